"""How many states to keep, and which stretch to replay when: binomial schedules."""

from __future__ import annotations

import math

from sparing.errors import UserError


def capacity(states: int, replays: int) -> int:
    """Longest run that so many snapshots reverse with each step advanced at most ``replays`` times.

    Args:
        states: Snapshots, the start among them (count).
        replays: Times a step may be advanced (count).

    Returns:
        Units (count).

    Source: Griewank & Walther 2000, Algorithm 799: C(states + replays, states).
    """
    return math.comb(states + replays, states)


def replays_of(length: int, states: int) -> int:
    """Least number of times any step is advanced.

    Args:
        length: Units in the run (count).
        states: Snapshots besides the start (count).

    Returns:
        Least r with capacity(states + 1, r) >= length.
    """
    replays = 0
    while capacity(states + 1, replays) < length:
        replays += 1
    return replays


def split(length: int, states: int) -> int:
    """Where to put the next snapshot of a stretch.

    Args:
        length: Units in the stretch, at least 2 (count).
        states: Snapshots free, at least 1 (count).

    Returns:
        Units before the snapshot, 1 … length − 1; a choice of least total work.
    """
    replays = replays_of(length, states)
    fewest = capacity(states + 1, replays - 2) if replays >= 2 else 1
    place = max(fewest, length - capacity(states, replays))
    return min(max(place, 1), length - 1)


def work(length: int, states: int) -> int:
    """Units advanced in all, the graph-building pass over each unit not counted.

    Args:
        length: Units in the run (count).
        states: Snapshots besides the start (count).

    Returns:
        The least possible.
    """
    if length <= 1:
        return 0
    replays = replays_of(length, states)
    return replays * length - capacity(states + 2, replays - 1)


def square_root(steps: int) -> tuple[int, int]:
    """The schedule of √T: stretches of about √T steps, a snapshot before each.

    Args:
        steps: T (count).

    Returns:
        Steps whose graph is held at once, and snapshots besides the start.
    """
    leaf = math.isqrt(steps - 1) + 1
    return leaf, max(math.ceil(steps / leaf) - 1, 0)


def affordable(budget: int, steps: int, *, state: int, graph: int) -> int:
    """Snapshots that fit into a budget beside the graph of one step.

    Args:
        budget: Bytes for the whole backward pass.
        steps: T (count).
        state: Bytes of one state.
        graph: Bytes of the graph of one step.

    Returns:
        At most T − 1 (count).

    Raises:
        UserError: If not even the start and one graph fit.
    """
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
