"""What the page says about a record."""

from __future__ import annotations

from sparing.jobs.adapt.job import new_record
from sparing.jobs.adapt.page import answer, marked
from sparing.jobs.adapt.settings import Adapt


def test_the_heaviest_fifth_is_bold():
    rows = [{"token": token, "rgu": weight} for token, weight in zip("abcde", (1, 5, 2, 1, 1), strict=True)]
    spaced = [{**row, "token": " " + row["token"]} for row in rows]
    assert marked(spaced, "rgu") == "a **b** c d e"


def test_neighbours_in_bold_are_one_run():
    rows = [{"token": token, "rgu": weight} for token, weight in (("Sul", 9), ("iman", 9), *[(" x", 1)] * 8)]
    assert marked(rows, "rgu").startswith("**Suliman** x")


def test_the_answer_names_the_best_and_uniform():
    record = new_record(Adapt())
    for method, nll, em in (("base", 9.0, 0.0), ("uniform", 5.0, 2.0), ("fg-psi", 4.0, 10.0)):
        record.add("answers", method=method, nll=nll, em=em)
    text = answer(record)
    assert "(FG)²U in ψ" in text
    assert "**4.00 nat/token**" in text
    assert "uniform weights reach 5.00" in text
