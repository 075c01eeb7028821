"""One ring over all ranks in the order of their numbers, in place of rings axis by axis: which moves take it, how long.

``Wires(gather="flat")`` runs collectives so that span every axis; all others stay rings on their axis.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sparing.sharding.levels import Plan
from sparing.sharding.planner.config import Topology
from sparing.sharding.planner.workload import BucketSpec

Sizes = tuple[int, ...]


def flat_passes(spec: BucketSpec, plan: Plan, sizes: Sizes) -> tuple[int, int, int, int]:
    """How often each of the four transitions of a bucket goes once round a flat ring with all of it; 0: not at all.

    In the order of ``Rings``: an all-gather or reduce-scatter goes round once, an all-reduce twice.
    """
    tiers = len(sizes)
    p, g, os = (spec.plan or plan).levels(tiers)
    gather = int(_spans(sizes, 0, p))
    if not spec.trainable:
        return gather, 0, 0, 0
    # completed going out; where no part of it is cut, whole sums come back on the same ring
    sync = 2 * _spans(sizes, os, tiers) if prod(sizes[:os]) == 1 else int(_spans(sizes, g, os))
    return gather, int(_spans(sizes, 0, g)), sync, int(_spans(sizes, p, os))


def _spans(sizes: Sizes, coarse: int, fine: int) -> bool:
    """Whether all ranks take part in a move between two levels, along more than one axis."""
    active = [size for size in sizes[coarse:fine] if size > 1]
    return len(active) > 1 and prod(active) == prod(sizes)


def outermost_axis(sizes: Sizes) -> int:
    """The outermost axis along which there are ranks (0 innermost)."""
    return max((at for at, size in enumerate(sizes) if size > 1), default=0)


def flat_seconds(size: float, topology: Topology) -> float:
    """Time of an all-gather or reduce-scatter of ``size`` bytes on a flat ring over all ranks (s).

    Each hop waits for the slowest link on the way. One rank of a group sends to the next and has that wire for itself;
    the others, one fewer than there are, share those inside.
    """
    block, innermost = size / topology.world, topology.axes[0]
    inside = replace(innermost, sharing=min(innermost.sharing, max(innermost.size - 1, 1)))
    links = [inside, *(replace(axis, sharing=1.0) for axis in topology.axes[1:])]
    return (topology.world - 1) * max((link.seconds(block, 1) for link in links if link.size > 1), default=0.0)
