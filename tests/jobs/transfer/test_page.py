"""What the page says of studies whose losses are a formula."""

from __future__ import annotations

import math

import pytest

from snapshots import check_page
from sparing.jobs.transfer import Transfer
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.figures import curves, place_label
from sparing.jobs.transfer.page import caveats, page_of
from sparing.jobs.transfer.settings import cells, places
from sparing.report import Record


def study(**changes):
    """SP's best rate doubles when density is halved, SμPar's stays; one rate diverges."""
    given = {"widths": (128,), "densities": (1.0, 0.5, 0.25), "rules": ("sp", "supar"), "seeds": (0, 1)} | changes
    settings = Transfer(log2_rates=(-9, -8, -7, -6, -5, -4, -3), **given)
    results = {}
    for cell in cells(settings):
        best = -6 - (math.log2(cell.density) if cell.rule == "sp" else 0)
        lost = cell.x == -3 and cell.rule == "supar"
        loss = None if lost else 1 + 0.1 * cell.seed + (cell.x - best) ** 2 / 10
        results[cell] = {"loss": loss, "held_out_loss": loss, "diverged": lost, "start": 9.0}
    record = Record(question="?", settings=settings, seed=[0, 1], environment={})
    analyse(record, settings, results)
    return settings, record


def test_snapshot():
    settings, record = study()
    check_page(page_of(settings).of(record), __file__)


def test_divergence_gaps_and_left_out_places_are_said():
    settings, record = study(densities=(1.0, 0.25, 0.0625), least_live=16)
    words = " ".join(caveats(record, settings))
    assert "4 of 56 runs diverged" in words
    assert "128 at 0.0625" in words
    assert "(4 of 56" in curves(record, "supar", places(settings), name="").caption


def test_a_sweep_that_found_no_best_rate_does_not_say_that_it_stays():
    """Every rate too low: the highest tried is best everywhere, which says nothing of where the best is."""
    settings, record = study()
    for row in (row for row in record.rows if row["table"] == "optima"):
        row["best"], row["found"] = -9.0, "highest tried"
    assert "stays" not in curves(record, "supar", places(settings), name="").title
    settings, record = study()
    for row in (row for row in record.rows if row["table"] == "optima" and row["density"] == 0.25):
        row["best"], row["found"] = None, "nothing converged"
    assert "at 1/4" not in curves(record, "supar", places(settings), name="").title


def test_pairs_have_their_own_line():
    settings, record = study(pairs=("128:1", "256:0.25"))
    assert page_of(settings).of(record).sections[0].title == "How far the best value moves"
    assert "d = 256, 1/4" in curves(record, "sp", places(settings), name="pairs").title


def test_an_unfinished_study_says_so():
    settings, record = study()
    record.rows[:] = [row for row in record.rows if row["table"] != "runs" or row["seed"] == 0]
    assert "Unfinished: 42 of 84" in caveats(record, settings)[0]


@pytest.mark.parametrize(
    ("place", "widths", "name"), [((128, 1.0), 1, "dense"), ((128, 0.3), 1, "0.3"), ((64, 0.125), 2, "d = 64, 1/8")]
)
def test_places_are_named(place, widths, name):
    assert place_label(*place, widths=widths) == name
