"""The learning rate against its closed form."""

from __future__ import annotations

import math

import pytest

from sparing.jobs.schedule import Schedule, rate


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_cosine_is_the_closed_form(warmup: int) -> None:
    got = [rate(s, peak=3.0, steps=20, warmup=warmup) for s in range(20)]

    rise = [3.0 * (s + 1) / warmup for s in range(warmup)]
    fall = [1.5 + 1.5 * math.cos(math.pi * k / (20 - warmup)) for k in range(20 - warmup)]
    assert got == pytest.approx(rise + fall, rel=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_line_is_the_closed_form(warmup: int) -> None:
    got = [rate(s, peak=3.0, steps=20, warmup=warmup, schedule="linear") for s in range(21)]

    rise = [3.0 * (s + 1) / warmup for s in range(warmup)]
    assert got[:warmup] == rise
    assert got[warmup] == 3.0
    assert got[-1] == 0.0
    falls = [a - b for a, b in zip(got[warmup:], got[warmup + 1 :], strict=False)]
    assert falls == pytest.approx([3.0 / (20 - warmup)] * (20 - warmup), rel=1e-12)


def test_constant_is_flat_after_the_rise() -> None:
    assert [rate(s, peak=2.0, steps=9, warmup=4, schedule="constant") for s in range(9)] == [0.5, 1, 1.5] + [2.0] * 6


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_step_of_a_run_moves_something(schedule: Schedule) -> None:
    assert all(rate(s, peak=1.0, steps=7, warmup=warmup, schedule=schedule) > 0 for s in range(7) for warmup in (0, 6))


def test_a_resumed_run_has_the_same_rates() -> None:
    """A pure function: no state, so asking in any order gives the same."""
    forwards = [rate(s, peak=1.0, steps=50, warmup=3) for s in range(50)]
    assert [rate(s, peak=1.0, steps=50, warmup=3) for s in reversed(range(50))] == forwards[::-1]
