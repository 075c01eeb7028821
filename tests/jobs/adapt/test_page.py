"""What the page says about a record."""

from __future__ import annotations

import math

from snapshots import check_page
from sparing.jobs.adapt.job import new_record
from sparing.jobs.adapt.page import PAGE, answer, bold_heaviest, loss_bars, rule
from sparing.jobs.adapt.settings import Adapt
from sparing.report import Record


def a_record(*methods: tuple[str, float, float]) -> Record:
    """Loss and exact match by method; one document of five tokens, one question."""
    record = new_record(Adapt())
    names = [name for name, _, _ in methods]
    for name, nll, em in methods:
        record.add("answers", method=name, steps=2, seconds=60.0, lr=0.1, nll=nll, em=em, f1=2 * em, kl=0.01)
        if name not in {"base", "names"}:
            for at in (0, 60):
                record.add("curve", method=name, seconds=at, nll=nll + 1 - at / 60, f1=em)
            for token, weight in (("Pedro", 4.0), ("the", 0.5)):
                record.add("tokens", method=name, token=token, weight=weight)
    for at, token in enumerate((" The", " cat", " of", " Pedro", " slept")):
        record.add("passage", token=token, **{name: float(1 + at % 4) for name in names[1:]})
    for part, there, taken in (("tuning, without a question", 9, 9), ("test stream", 8, 5)):
        record.add("documents", part=part, there=there, taken=taken)
    record.add("samples", prompt="They came to", answer="Toledo", **{name: f" the {name}" for name in names})
    return record


def test_snapshot():
    check_page(
        PAGE.of(
            a_record(
                ("base", 9.0, 0.0), ("uniform", 5.0, 2.0), ("names", 4.2, 6.0), ("rgu", 4.5, 5.0), ("fg-psi", 4.0, 10.0)
            )
        ),
        __file__,
    )


def test_what_the_base_model_read_first_is_told():
    def told(tune: int, plain: int) -> str:
        record = new_record(Adapt(tune=tune))
        record.add("documents", part="tuning, without a question", there=plain, taken=plain)
        return rule(record)

    assert told(1, 9).endswith("the base model passes over the documents of the first part without a question.")
    assert told(1, 0).endswith("was not tuned: every document of the first part has a question.")
    assert told(0, 9).endswith("passed over none of them before.")


def test_uniform_weights_are_the_best_of_a_run_that_learns_none():
    page = PAGE.of(a_record(("base", 9.0, 0.0), ("uniform", 5.0, 2.0)))
    assert page.answer.startswith("With uniform weights, one pass")
    assert "uniform weights reach" not in page.answer
    assert [section.title for section in page.sections] == ["Answers", "Against time", "Questions"]


def test_weights_that_validation_does_not_tell_from_uniform_ones_are_named():
    record = a_record(("base", 9.0, 0.0), ("uniform", 5.0, 2.0), ("rgu", 4.5, 5.0), ("fg-psi", 4.0, 10.0))
    assert "no better" not in answer(record)  # nothing was swept
    objectives = {"uniform": (6.0, 5.0), "rgu": (4.9, 7.0), "fg-psi": (5.0, 6.0), "fg-phi": (math.nan, math.inf)}
    for name, each in objectives.items():
        for rate, objective in zip((0.1, 0.2), each, strict=True):
            record.add("sweep", method=name, lr=rate, nll=1.0, kl=0.0, objective=objective)
    assert answer(record).endswith(
        " On the validation documents these weights are no better than uniform ones: (FG)²U in ψ, (FG)²U in φ."
    )
    alone = a_record(("base", 9.0, 0.0), ("rgu", 4.5, 5.0))
    alone.add("sweep", method="rgu", lr=0.1, nll=1.0, kl=0.0, objective=9.0)
    assert "no better" not in answer(alone)


def test_steps_that_changed_nothing_and_own_texts_are_told():
    record = a_record(("base", 9.0, 0.0), ("rgu", 5.0, 2.0))
    assert PAGE.of(record).reproduce["data"] == "two public-domain children's books"
    record.settings["data"] = ("books/mine.txt", "books/yours.txt")
    assert PAGE.of(record).reproduce["data"] == "mine.txt, yours.txt"
    for applied in (True, False, False):
        record.add("meta", method="rgu", applied=applied)
    told = [line for line in PAGE.of(record).caveats if "changed nothing" in line]
    assert told == [
        "RGU, at most 6 documents: 2 of 3 outer steps changed nothing, since their window overflowed; a smaller "
        "--inner-lr or --inner-clip prevents that."
    ]


def test_the_heaviest_fifth_is_bold():
    rows = [{"token": token, "rgu": weight} for token, weight in zip("abcde", (1, 5, 2, 1, 1), strict=True)]
    spaced = [{**row, "token": " " + row["token"]} for row in rows]
    assert bold_heaviest(spaced, "rgu") == "a **b** c d e"


def test_neighbours_in_bold_are_one_run():
    rows = [{"token": token, "rgu": weight} for token, weight in (("Sul", 9), ("iman", 9), *[(" x", 1)] * 8)]
    assert bold_heaviest(rows, "rgu").startswith("**Suliman** x")


def test_a_method_that_diverged_is_not_the_best():
    page = PAGE.of(
        a_record(("base", 9.0, 0.0), ("uniform", 5.0, 2.0), ("rgu", math.nan, 0.0), ("fg-psi", math.inf, 0.0))
    )
    assert page.answer.startswith(
        "With uniform weights, one pass over the documents takes the answers from 9.00 to **5"
    )
    bars = loss_bars(a_record(("base", math.nan, 0.0), ("rgu", 6.0, 1.0), ("uniform", 5.0, 2.0)))
    assert "Least surprise about the answers: uniform weights" in str(bars)
    lost = answer(a_record(("base", 9.0, 0.0), ("uniform", math.nan, 0.0)))
    assert lost == "One pass over the documents diverged with every method: no loss of the answers is finite."


def test_a_run_in_which_every_method_diverged_has_a_page():
    page = PAGE.of(a_record(("base", 9.0, 0.0), ("uniform", math.nan, 0.0), ("rgu", math.nan, 0.0)))
    assert page.answer.startswith("One pass over the documents diverged with every method")
    assert page.render()
