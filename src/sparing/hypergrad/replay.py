"""How many states to keep, and which stretch to replay when: binomial schedules."""

from __future__ import annotations

import math

from sparing.errors import UserError


def capacity(states: int, replays: int) -> int:
    """Longest run that so many snapshots reverse with each step advanced at most ``replays`` times.

    Source: Griewank & Walther 2000, Algorithm 799: C(states + replays, states).
    """
    return math.comb(states + replays, states)


def min_replays(length: int, states: int) -> int:
    """Least number of times any step is advanced."""
    replays = 0
    while capacity(states + 1, replays) < length:
        replays += 1
    return replays


def next_snapshot(length: int, states: int) -> int:
    """Where to put the next snapshot of a stretch."""
    replays = min_replays(length, states)
    fewest = capacity(states + 1, replays - 2) if replays >= 2 else 1
    place = max(fewest, length - capacity(states, replays))
    return min(max(place, 1), length - 1)


def work(length: int, states: int) -> int:
    """Units advanced in all, the graph-building pass over each unit not counted."""
    if length <= 1:
        return 0
    replays = min_replays(length, states)
    return replays * length - capacity(states + 2, replays - 1)


def sqrt_schedule(steps: int) -> tuple[int, int]:
    """The schedule of √T: stretches of about √T steps, a snapshot before each."""
    leaf = math.isqrt(steps - 1) + 1
    return leaf, max(math.ceil(steps / leaf) - 1, 0)


def affordable_states(budget: int, steps: int, *, state: int, graph: int) -> int:
    """Snapshots that fit into a budget beside the graph of one step."""
    spare = budget - graph - 2 * state  # the start of the run, and the state that moves
    if spare < 0:
        need = graph + 2 * state
        raise UserError(
            "memory",
            got=f"{budget} B",
            why=f"the graph of one step and two states take {need} B",
            do=f"give at least {need} B, or use ForwardGradient",
        )
    return min(spare // max(state, 1), steps - 1)
