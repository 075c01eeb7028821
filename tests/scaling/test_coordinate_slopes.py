"""Fits and verdicts of the coordinate check on rows that are a formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sparing.scaling.check.slopes import LEAST_LIVE, Slope, slope, slopes, student


def rows(exponent, *, stat="forward", role="hidden", live=64, wobble=0.0, seeds=(0,)):
    """Sizes ρ^exponent · width^0 at widths 64, 128 and three densities; seeds scatter by ``wobble`` in log2."""
    found = []
    for seed in seeds:
        for width in (64, 128):
            for density in (1.0, 0.5, 0.25):
                size = density ** (exponent + wobble * (seed - 1))
                stats = {"forward": 1.0, "gradient": 1.0, "update": 1.0} | {stat: size}
                place = {"module": "layer", "role": role, "width": width, "density": density, "live": live}
                found += [place | stats | {"step": step, "seed": seed} for step in (0, 1)]
    return found


@pytest.mark.parametrize("power", [-1.5, 0.0, 0.37])
def test_slope_is_the_power(power):
    assert slope((x, 3 * x**power) for x in (1.0, 2.0, 7.0)) == pytest.approx(power)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_dead_or_exploded_size_has_no_slope_and_does_not_pass(bad):
    assert math.isnan(slope([(1.0, 1.0), (2.0, bad)]))
    found = slopes([row | {"update": bad} for row in rows(0.0)], limit=0.05, loose=0.1)
    assert all(not one.passed for one in found if one.stat == "update")


def test_every_axis_is_fitted_at_every_fixed_value():
    found = slopes(rows(0.3), limit=0.05, loose=0.1)
    forward = {(one.along, one.at): one.slope for one in found if one.stat == "forward"}
    assert forward == pytest.approx({
        ("density", 64): 0.3, ("density", 128): 0.3, ("width", 1.0): 0, ("width", 0.5): 0, ("width", 0.25): 0,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("stat", "power", "passes"),
    [("forward", 0.049, True), ("forward", -0.051, False), ("update", 0.099, True), ("gradient", -0.101, False)],
)
def test_limits_are_those_of_the_statistic(stat, power, passes):
    found = slopes(rows(power, stat=stat), limit=0.05, loose=0.1)
    assert all(one.passed for one in found) == passes


def test_a_readout_is_judged_by_its_update_only():
    shown = slopes(rows(0.5, role="readout"), limit=0.05, loose=0.1)
    assert all(one.passed for one in shown)
    assert any(one.limit is None and one.slope == pytest.approx(0.5) for one in shown)
    assert not all(one.passed for one in slopes(rows(0.5, role="readout", stat="update"), limit=0.05, loose=0.1))


def test_points_with_few_live_inputs_are_left_out():
    few = [row | {"live": LEAST_LIVE - 1} if row["density"] == 0.25 else row for row in rows(0.0)]
    wrong = [row | {"forward": 99.0} if row["density"] == 0.25 else row for row in few]
    assert all(one.passed for one in slopes(wrong, limit=0.05, loose=0.1))
    assert {one.points for one in slopes(few, limit=0.05, loose=0.1) if one.along == "density"} == {2}


def test_scatter_over_seeds_is_the_standard_error_and_forgiven_as_often_as_chance_asks():
    """Twelve slopes judged at three seeds and 5 % in all: Student's quantile of two degrees of freedom at 5 % / 12."""
    found = slopes(rows(0.08, wobble=0.03, seeds=(0, 1, 2)), limit=0.05, loose=0.1)
    forward = next(one for one in found if one.stat == "forward" and one.along == "density")
    assert forward.slope == pytest.approx(0.08)
    assert forward.error == pytest.approx(0.03 / 3**0.5)  # slopes .05 .08 .11: deviation .03
    assert forward.errors == pytest.approx(stats.t.ppf(1 - 0.05 / len(found) / 2, 2))
    assert forward.passed
    assert not Slope(**{name: getattr(forward, name) for name in forward.__dataclass_fields__} | {"error": 0.0}).passed


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("chance", [0.3, 0.05, 1e-4])
def test_students_quantile_is_scipys(freedom, chance):
    """To 1e-9: a bisection of sixty halvings, through a tangent that is steep at one degree of freedom."""
    assert student(chance, freedom) == pytest.approx(stats.t.ppf(1 - chance / 2, freedom), rel=1e-9)


def test_of_right_slopes_one_check_in_twenty_fails_by_chance():
    """Drawn: 30 normal slopes of no mean at three seeds, limit 0; two standard errors would fail nearly every check."""
    draws = np.random.default_rng(0).normal(size=(2000, 30, 3))
    t = np.abs(draws.mean(-1)) / (draws.std(-1, ddof=1) / 3**0.5)
    assert (t > student(0.05 / 30, 2)).any(1).mean() == pytest.approx(0.05, abs=0.015)  # three deviations
    assert (t > 2).any(1).mean() > 0.99


def test_a_slope_says_itself_in_a_line():
    (found, *_) = slopes(rows(0.5), limit=0.05, loose=0.1)
    assert str(found) == "layer: forward goes with density^(+0.500) at width 64 (limit 0.05)"


@pytest.mark.parametrize(("slope", "error", "passes"), [(0.24, 0.1, True), (0.26, 0.2, False), (0.1, 0.25, False)])
def test_no_scatter_excuses_a_slope_beyond_the_bound_or_one_that_tells_nothing(slope, error, passes):
    """With the bound at a quarter: within 1/4, and the interval of two standard errors within 1/2."""
    found = slopes(rows(0.0), limit=0.05, loose=0.1)[0]
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    one = Slope(**fields | {"slope": slope, "error": error})
    assert one.interval == pytest.approx((slope - 2 * error, slope + 2 * error))
    assert one.passed == passes
    if not passes and error < 0.25:
        assert Slope(**fields | {"slope": slope, "error": error, "bound": 0.5}).passed


def test_logits_are_judged_by_their_changes():
    found = slopes(rows(0.5, role="logits"), limit=0.05, loose=0.1)
    assert all(one.passed for one in found)
    assert any(one.limit is None for one in found)
