"""Rows become series: seeds become a mean with a spread and n."""

from __future__ import annotations

import math

import pytest

from sparing.report.cells import Scale
from sparing.report.series import Axis, Series, as_axis, series

ROLES = {"lisa": "ours", "full": "reference"}


def test_seeds_become_mean_lowest_highest_and_n() -> None:
    runs = [(step, seed) for step in (20, 10) for seed in (0, 1, 5)]
    rows = [{"method": "lisa", "seed": seed, "step": step, "loss": 1.0 * seed + step} for step, seed in runs]
    assert series(rows, x="step", y="loss", roles=ROLES) == [
        Series("lisa", [10, 20], [12, 22], "ours", low=[10, 20], high=[15, 25], n=3)
    ]


def test_a_single_run_has_no_spread() -> None:
    one, other = series([{"method": name, "x": 1, "y": 2} for name in ("full", "own")], x="x", y="y", roles=ROLES)
    assert (one.role, other.role) == ("reference", "baseline")
    assert one.low is None
    assert one.n is None


def test_rows_may_bring_their_own_interval() -> None:
    rows = [{"by": "a", "x": 1, "y": 2.0, "y_low": 1.5, "y_high": 2.5, "n": 7}]
    (one,) = series(rows, x="x", y="y", by="by")
    assert (one.low, one.high, one.n) == ([1.5], [2.5], 7)


def test_rows_without_a_value_are_left_out_and_a_diverged_seed_is_a_gap() -> None:
    rows = [{"method": "a", "x": 1, "y": None}, {"method": "a", "x": "b", "y": 1}, {"method": "a", "y": 1}]
    assert series(rows, x="x", y="y") == []
    rows = [{"method": "a", "x": x, "y": y} for x, y in ((1, math.nan), (1, 1.0), (2, 3.0))]
    (one,) = series(rows, x="x", y="y")
    assert math.isnan(one.y[0])
    assert one.y[1] == 3.0


def test_an_axis_names_quantity_and_shown_unit() -> None:
    axis = Axis("peak_memory", "B")
    scale = axis.scaled([2**31])
    assert axis.text(scale) == "peak memory (GiB)"
    assert as_axis("step") == Axis("step")
    assert Axis("step").text(Scale(1, "")) == "step"
    with pytest.raises(AttributeError):
        axis.unit = "s"  # type: ignore[misc]


def test_names_are_written_in_place_of_keys() -> None:
    rows = [{"method": "lisa", "step": step, "loss": 1.0} for step in (0, 1)]
    (one,) = series(rows, x="step", y="loss", names={"lisa": "LISA"}, roles={"lisa": "rival"})
    assert (one.label, one.role) == ("LISA", "rival")
