"""The tables of a study against one whose losses are a formula: optimum, slope and regret are known."""

from __future__ import annotations

import math

import pytest

from sparing.jobs.transfer import Transfer
from sparing.jobs.transfer.analysis import analyse, check_rule
from sparing.jobs.transfer.inputs import gather
from sparing.jobs.transfer.settings import cells
from sparing.report import Record

RATES = (-9, -8, -7, -6, -5, -4, -3)


def study(exponent, *, broken=(), **changes):
    """Loss 1 + (x - x*)² / 10 with x* = -6 + exponent · log2 ρ, the same for every seed but a shift of the loss."""
    settings = Transfer(
        widths=(128,), densities=(1.0, 0.5, 0.25), log2_rates=RATES, seeds=(0, 1, 2), rules=("sp",), **changes
    )
    results = {}
    for cell in cells(settings):
        best = -6 + exponent * math.log2(cell.density)
        loss = 1 + 0.1 * cell.seed + (cell.x - best) ** 2 / 10
        lost = (cell.density, cell.x) in broken
        results[cell] = {"loss": None if lost else loss, "diverged": lost, "start": 9.0}
    record = Record(question="?", settings=settings, seed=[0, 1, 2], environment={})
    analyse(record, settings, results)
    return record


@pytest.mark.parametrize("exponent", [0.0, -0.9, 0.4])
def test_slope_and_drift_are_those_of_the_formula(exponent):
    record = study(exponent)

    (row,) = record.table("summary")
    drifts = [row["drift"] for row in record.table("transfer")]

    assert row["slope"] == pytest.approx(exponent, abs=1e-9)
    assert drifts == pytest.approx([0.0, -exponent, -2 * exponent], abs=1e-9)
    assert row["drift"] == pytest.approx(-2 * exponent, abs=1e-9)
    assert record.table("transfer")[2]["drift_low"] == pytest.approx(-2 * exponent, abs=1e-9)  # seeds only shift it


def test_regret_is_paid_at_the_dense_optimum():
    row = study(-1.0).table("transfer")[2]  # best at -4, used at -6: 1.1 + 0.4 instead of 1.1
    assert row["regret"] == pytest.approx(1.5 / 1.1 - 1)
    assert (row["loss_transferred"], row["loss_retuned"]) == pytest.approx((1.5, 1.1))


def test_collapse_is_the_largest_distance_of_logarithms():
    row = study(-1.0).table("transfer")[1]  # below -6: at -9 it is 1.1 + 1.6 against 1.1 + 0.9
    assert row["collapse"] == pytest.approx(math.log(2.7 / 2.0))


def test_optima_at_the_end_are_censored_and_no_part_of_the_slope():
    record = study(-1.5)  # at ρ = 1/4 the best one is -3, the last tried
    (row,) = record.table("summary")
    assert [line["found"] for line in record.table("optima")] == ["inside", "inside", "highest tried"]
    assert row["censored"] == 1
    assert row["slope"] == pytest.approx(-1.5, abs=0.51)  # the middle one lies between two rates of equal loss


def test_divergence_is_counted_and_stands_in_the_runs():
    record = study(0.0, broken={(0.25, -6), (0.25, -3)})

    (row,) = record.table("summary")
    transfer = record.table("transfer")[2]

    assert (row["diverged"], row["runs"], row["diverged_at_transfer"]) == (6, 63, 1)
    assert transfer["regret"] == math.inf
    assert sum(row["diverged"] for row in record.table("runs")) == 6
    assert len(record.table("runs")) == 63


def test_every_seed_of_the_coordinate_check_draws_its_own_weights(tiny):
    """Without masks nothing but weights tells seeds apart: sizes before the first step differ between them."""
    found = check_rule(tiny, gather(tiny), "supar")
    first = [row for row in found.rows if (row["step"], row["density"]) == (0, 1.0) and row["module"] == "hidden.0"]
    assert len({row["forward"] for row in first}) == len({row["seed"] for row in first}) == 4
    again = check_rule(tiny, gather(tiny), "supar")
    assert again.rows == found.rows
