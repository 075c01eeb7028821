"""Binomial checkpointing: how many states to keep, and where.

A unit is what is differentiated at once: a step, or a block of steps. Lengths, snapshots and replays are counts.
Source: Griewank & Walther 2000, Algorithm 799.
"""

from __future__ import annotations

import math

from sparing.errors import UserError


def capacity(states: int, replays: int) -> int:
    """Longest run (units) that ``states`` snapshots, start included, reverse with each unit run ``replays`` times."""
    return math.comb(states + replays, states)


def min_replays(length: int, states: int) -> int:
    """Least number of replays r with capacity(states + 1, r) ≥ length; ``states`` besides the start."""
    replays = 0
    while capacity(states + 1, replays) < length:
        replays += 1
    return replays


def next_snapshot(length: int, states: int) -> int:
    """Units before the next snapshot, 1 … length − 1, for least total work; length ≥ 2, states ≥ 1 free."""
    replays = min_replays(length, states)
    # the shortest head of least work: the tail must fit with one snapshot less, the head has one replay less
    fewest = capacity(states + 1, replays - 2) if replays >= 2 else 1
    place = max(fewest, length - capacity(states, replays))
    return min(max(place, 1), length - 1)


def work(length: int, states: int) -> int:
    """Least number of units run in all, without the pass over each unit that builds its graph."""
    if length <= 1:
        return 0
    replays = min_replays(length, states)
    return replays * length - capacity(states + 2, replays - 1)


def sqrt_schedule(steps: int) -> tuple[int, int]:
    """About √T steps whose graph is held at once, and the snapshots besides the start."""
    leaf = math.isqrt(steps - 1) + 1
    return leaf, max(math.ceil(steps / leaf) - 1, 0)


def affordable_states(budget: int, steps: int, *, state: int, graph: int) -> int:
    """Snapshots, at most T − 1, that fit into a budget beside the graph of one step; all sizes in bytes."""
    spare = budget - graph - 2 * state  # the start of the run, and the current state
    if spare < 0:
        need = graph + 2 * state
        raise UserError(
            "memory", got=f"{budget} B", why=f"the graph of one step and two states take {need} B",
            do=f"give at least {need} B, or use ForwardGradient",
        )  # fmt: skip
    return min(spare // max(state, 1), steps - 1)
