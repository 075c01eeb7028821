import pytest

from snapshots import check_page
from sparing.jobs.merge.page import MOST_BARS, PAGE, answer, between_figures, caveats, score_figure, sign_figure
from sparing.report import Record


def record_of(*, merged=True, measured=True, gap=0.02, way="soup", stale=False, blocks=3, models=("a", "b")):
    record = Record(question="Can they?", settings={"models": list(models)}, seed=0, environment={})
    record.add("outlook", verdict="will merge", sentence="The weights say that they will merge.", pair="A–B")
    record.add("forecast", pair="A–B", verdict="will merge", gap_loss=0.1, gap_loss_low=0.0, gap_loss_high=0.2,
               gap_error=0.1, gap_error_low=0.0, gap_error_high=0.2, corrected=0.9)  # fmt: skip
    for at in range(blocks):
        record.add("signs", block=f"h.{at}", agreement=0.9 + at / 1000, chance=0.5, corrected=0.8)
    record.add("decision", merged=merged, way=way, reason="so it is", advice="do this", metric="loss",
               source="64 rows", stale=stale)  # fmt: skip
    if measured:
        for name, loss, kind in (("A (a)", 2.0, "parent"), ("B (b)", 2.4, "parent"), ("the merge", 2.2 + gap, "merge")):
            record.add("models", model=name, kind=kind, loss=loss, error=loss / 10, rows=64)
        for metric in ("loss", "error"):
            record.add("gap", metric=metric, gap=gap, gap_low=gap - 0.01, gap_high=gap + 0.01, n=64, predicted=0.1,
                       predicted_low=0.0, predicted_high=0.2)  # fmt: skip
            record.add("best", metric=metric, best="A (a)", difference=0.2 + gap, difference_low=0.19 + gap,
                       difference_high=0.21 + gap, mcnemar_p=0.01 if metric == "error" else None, n=64)  # fmt: skip
        for t in (0.0, 0.5, 1.0):
            record.add("between", t=t, loss=2 + 0.4 * t + (0.05 if t == 0.5 else 0), error=0.2)
    return record


def test_snapshot():
    check_page(PAGE.of(record_of()), __file__)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "**costs something**"),
        ({}, "does not beat the best parent"),
        ({"gap": -0.3}, "costs nothing"),
        ({"gap": -0.3}, "the **prediction was wrong**"),
        ({"gap": -0.3}, "is better than the best parent"),
        ({"gap": 0.005}, "costs nothing that these rows could tell"),
        ({"gap": -0.2}, "is not told apart from"),
        ({"gap": float("nan")}, "numbers that are not finite"),
        ({"measured": False}, "without `--data`"),
        ({"merged": False, "measured": False}, "**No merge was made.** So it is. Do this."),
    ],
)
def test_the_answer_says_what_the_intervals_say(changes, said):
    assert said in answer(record_of(**changes))


@pytest.mark.parametrize(
    ("difference", "said"),
    [(-0.2, "is better than the plain"), (0.2, "is worse than the plain"), (0.005, "is not told apart from the plain")],
)
def test_the_plain_average_is_the_control(difference, said):
    record = record_of(way="ties, λ = 1")
    assert "plain average" not in answer(record)
    record.add("models", model="the plain average", kind="average", loss=2.2, error=0.2, rows=64)
    record.add("control", metric="loss", difference=difference, difference_low=difference - 0.01,
               difference_high=difference + 0.01, n=64)  # fmt: skip
    assert said in answer(record)
    assert "the plain average 2.20 nats" in score_figure(record).alt


def test_pictures_name_what_they_find():
    assert "Line plot" in sign_figure(record_of(blocks=MOST_BARS + 1)).alt
    assert sign_figure(record_of(blocks=0)) is None
    assert between_figures(record_of(measured=False)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured": False}, "Nothing was measured"),
        ({"stale": True}, "Batch-norm statistics were averaged"),
        ({"models": ("a", "b", "c")}, "worst pair"),
        ({"way": "ties, λ = 1"}, "of the plain mean"),
        ({}, "64 rows"),
    ],
)
def test_caveats_fit_the_run(changes, said):
    assert any(said in note for note in caveats(record_of(**changes)))
