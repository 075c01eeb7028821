"""What the page says of records made by hand."""

from __future__ import annotations

import math
from pathlib import Path

from snapshots import check_page, text_of
from sparing.jobs.attribute import run
from sparing.jobs.attribute.inputs import gather
from sparing.jobs.attribute.page import PAGE, agreement, answer, brief, caveats, prediction_name, rows_section
from sparing.report import Record


def record(*, sets: int = 4, warning: str = "") -> Record:
    made = Record(
        question="Q?", settings={"data": "mnist", "share": 0.01}, seed=0, units={"loss": "nat"}, environment={}
    )
    made.add("run", rows=100, steps=20, seconds=3.0, parameters=50_890, metasmoothness=0.91, bend=0.1, warning=warning)
    for test, word in ((3, "seven"), (5, "two")):
        made.add("predictions", test=test, label_or_text=word, loss=0.25)
        for side, sign in (("helps", -1.0), ("harms", 1.0)):
            made.add("rows", test=test, side=side, place=1, row=11, position=1, label_or_text="a" * 70, influence=sign)
        for number in range(sets):
            made.add("drops", set=number, test=test, predicted=number / 10, measured=number / 9)
        if sets:
            made.add("agreement", test=test, label_or_text=word, rank_correlation=0.9 + test / 100, n=sets)
    return made


def test_snapshot() -> None:
    check_page(PAGE.of(record()), __file__)


def test_rows_of_a_text_stand_beside_what_was_predicted(text) -> None:
    """Each by itself: a row is no continuation of another."""
    settings = text()
    section = rows_section(run(settings), gather(settings))
    (sample,) = section.samples
    assert sample.prompt == ""
    assert next(iter(sample.texts)) == "predicted"
    assert {name.split(",")[0] for name in list(sample.texts)[1:]} <= {"helps", "harms"}
    poem = Path(settings.data).read_text()
    assert all(words in poem for words in sample.texts.values())


def test_what_numbers_of_rows_mean() -> None:
    """Of a text without a test file, and of digits, test rows have numbers in the data too."""
    words = {
        ("mnist", None): ("in the training images", False),
        ("digits", None): ("in scikit-learn's digits", True),
        ("in/rows.jsonl", None): ("**test** is one among the rows set aside", True),
        ("in/rows.jsonl", "in/test.jsonl"): ("**test** is one in test.jsonl", False),
    }
    for (data, test), (said, aside) in words.items():
        made = record()
        made.settings |= {"data": data, "test": test}
        for row in made.rows:
            if row["table"] == "predictions":
                row["row"] = 77
        text = text_of(PAGE.of(made))
        assert said in text
        assert ("test | row | label" in text) == aside
        assert prediction_name(made.table("predictions")[0], made).endswith("(row 77 of the data)") == aside


def test_runs_that_diverged_and_short_rows_are_named() -> None:
    made = record()
    for row in made.rows:
        if row["table"] == "drops":
            row["measured"] = math.nan if row["set"] else math.inf
        if row["table"] == "run":
            row["left_out"] = 20
    made.rows[:] = [row for row in made.rows if row["table"] != "agreement"]
    assert "4 sets were dropped, and retraining diverged." in answer(made)
    assert "Sets without which the retrained run diverged: 4." in " ".join(caveats(made))
    assert "Rows of fewer than four bytes, which are left out: 20." in " ".join(caveats(made))
    assert agreement(made) is None


def test_the_answer_is_the_rank_correlation() -> None:
    assert "**0.94** (lowest 0.93 of 2), over 4 random sets of 1 %" in answer(record())
    assert "No set was dropped, so nothing checks them." in answer(record(sets=0))
    made = record(sets=2)
    made.rows[:] = [row for row in made.rows if row["table"] != "agreement"]
    assert "2 sets were dropped, too few to rank" in answer(made)


def test_a_run_that_is_not_smooth_is_called_so() -> None:
    assert "This run is not smooth: m." in caveats(record(warning="m"))
    assert not any("smooth" in text for text in caveats(record()))


def test_long_texts_are_cut_in_tables() -> None:
    assert len(brief("a" * 70)) == 60
    assert brief("short") == "short"
