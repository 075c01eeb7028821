"""What the page says of studies whose losses are a formula."""

from __future__ import annotations

import math

import pytest

from sparing.jobs.transfer import Transfer
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.figures import curves, drift_figure, pareto_figure, place_label
from sparing.jobs.transfer.grid import cells, places
from sparing.jobs.transfer.page import answer, caveats, sections
from sparing.report import Record


def study(**changes):
    """SP's best rate doubles when density is halved, SμPar's stays; one rate diverges."""
    given = {"widths": (128,), "densities": (1.0, 0.5, 0.25), "rules": ("sp", "supar"), "seeds": (0, 1)} | changes
    settings = Transfer(rates=(-9, -8, -7, -6, -5, -4, -3), **given)
    results = {}
    for cell in cells(settings):
        best = -6 - (math.log2(cell.density) if cell.rule == "sp" else 0)
        lost = cell.x == -3 and cell.rule == "supar"
        loss = None if lost else 1 + 0.1 * cell.seed + (cell.x - best) ** 2 / 10
        results[cell] = {"loss": loss, "held_out_loss": loss, "diverged": lost, "start": 9.0}
    record = Record(question="?", settings=settings, seed=[0, 1], environment={})
    analyse(record, settings, results)
    return settings, record


def test_the_answer_names_every_rule_with_its_factor_and_price():
    _, record = study()
    said = answer(record)
    assert "SP **4.0× up**, +38.1 % loss" in said  # from 1.05 to 1.45
    assert "SμPar **1.0×**, +0 % loss" in said


def test_titles_say_how_far_the_best_rate_moves():
    settings, record = study()
    assert "moves 4.0× up at 1/4" in curves(record, "sp", places(settings), name="width 128").title
    assert "stays at 1/4" in curves(record, "supar", places(settings), name="width 128").title
    assert drift_figure(record, "width 128", "density").title == "SμPar moves by 1.0× at most, SP by 4.0×"
    assert pareto_figure(record, "width 128", "density") is not None


def test_divergence_gaps_and_left_out_places_are_said():
    settings, record = study(densities=(1.0, 0.25, 0.0625), least_live=16)
    words = " ".join(caveats(record, settings))
    assert "4 of 56 runs diverged" in words
    assert "128 at 0.0625" in words
    assert "(4 of 56" in curves(record, "supar", places(settings), name="").caption


def test_pairs_have_their_own_line():
    settings, record = study(pairs=("128:1", "256:0.25"))
    assert sections(record, settings)[0].title == "How far the best value moves"
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
