"""The paper's printed speed-ups beside readings of its clusters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_where_arithmetic_is_free_ratios_are_those_of_the_wires():
    """By hand for 7B: m = 8, n = 32, ten micro-steps of 112 Gbit at 80 and 2000 Gbit/s."""
    from benchmarks.network.published import PRINTED, Reading, flat

    gathers = 10 * 3 * 31 / 32 * 112 / 80
    inside = 10 * 3 * 7 / 8 * 112 / 2000
    between = 2 * 3 / 32 * 112 / 80  # gradients completed, then new parameters gathered
    free = Reading(speed=1e30, hidden=0.0, early=False)
    assert flat(PRINTED[0], free) == pytest.approx(gathers / (inside + between), rel=1e-12)


def test_a_step_of_arithmetic_alone_and_of_both_in_turn():
    from benchmarks.network.published import PRINTED, Reading, flat_seconds

    whole = 10 * 6 * 7e9 * 4 * 512
    wires = 10 * 3 * 31 / 32 * 112 / 80
    seconds = {share: flat_seconds(PRINTED[0], "GGG", Reading(whole, share, early=False)) for share in (0.0, 0.5, 1.0)}
    assert seconds == pytest.approx({0.0: 1 + wires, 0.5: 0.5 + wires, 1.0: wires}, rel=1e-12)


def test_backward_passes_that_end_early_count_what_they_reach():
    from benchmarks.network.published import PRINTED, operations

    few = PRINTED[5]
    unit = 2 * few.params * 4 * 512
    assert operations(few, early=False) == pytest.approx((unit, unit * (1 + 1 / 16 + 1)))
    assert operations(few, early=True) == pytest.approx((unit, unit * 3 / 16))


def test_the_fit_is_the_best_of_its_grid_and_within_the_bar():
    from benchmarks.network.published import fitted, grid, off

    best = fitted(early=True)
    assert off(best) == min(off(reading) for reading in grid(early=True))
    assert off(best) < 1.5
    assert not math.isclose(off(best), 1.0)
