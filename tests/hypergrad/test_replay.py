"""Binomial schedules against a dynamic program that knows no formula."""

from __future__ import annotations

import math
from functools import cache

import pytest

from sparing.errors import UserError
from sparing.hypergrad.checkpointed import affordable_states, capacity, min_replays, next_snapshot, sqrt_schedule, work


@cache
def least(length: int, states: int) -> int:
    """Fewest units advanced to reverse a stretch: the first snapshot at every possible place."""
    if length <= 1:
        return 0
    if states == 0:
        return sum(range(length))
    return min(cut + least(length - cut, states - 1) + least(cut, states) for cut in range(1, length))


def walked(length: int, states: int) -> int:
    """Units advanced when each snapshot goes where ``split`` says."""
    if length <= 1:
        return 0
    if states == 0:
        return sum(range(length))
    cut = next_snapshot(length, states)
    assert 1 <= cut < length
    return cut + walked(length - cut, states - 1) + walked(cut, states)


@pytest.mark.parametrize("states", range(7))
def test_the_work_is_the_least_there_is_and_the_splits_attain_it(states: int) -> None:
    for length in range(1, 40):
        assert work(length, states) == least(length, states), (length, states)
        assert walked(length, states) == least(length, states), (length, states)


def test_capacity_is_binomial_and_replays_its_inverse() -> None:
    """C(c + r, c) with the start of the run among the c snapshots, r the least that covers the length."""
    for states in range(6):
        for length in range(2, 60):
            replays = min_replays(length, states)
            reach = [math.comb(states + 1 + r, states + 1) for r in (replays - 1, replays)]
            assert reach[0] < length <= reach[1]
            assert capacity(states + 1, replays) == reach[1]


def test_the_square_root_schedule_keeps_about_root_t_of_both() -> None:
    for steps in range(1, 200):
        leaf, states = sqrt_schedule(steps)
        assert leaf == math.ceil(math.sqrt(steps))
        assert leaf * states < steps <= leaf * (states + 1)


def test_a_budget_buys_what_is_left_beside_the_graph() -> None:
    assert affordable_states(1000, 50, state=100, graph=300) == 5
    assert affordable_states(500, 50, state=100, graph=300) == 0
    assert affordable_states(10**9, 50, state=100, graph=300) == 49


def test_a_budget_below_one_graph_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(
        UserError, match=r"memory: got 499 B; .* take 500 B; give at least 500 B, or use ForwardGradient"
    ):
        affordable_states(499, 50, state=100, graph=300)
