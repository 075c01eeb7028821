"""What a plan costs on ``fully_shard``: bytes on the wires and between steps, from the shapes of the parameters.

``fully_shard`` cuts every parameter along its rows and pads it to equal pieces, gathers frozen and trained parameters
of a block together, and cuts at the parameters' level, or, where those stay whole, at the optimizer's: that shard then
stays beside the whole parameters. Where the optimizer's level is finer than its own, the optimizer has copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.planner.traffic import (
    Part,
    Sizes,
    Traffic,
    backward_gathers,
    gather_parts,
    step_parts,
    sync_parts,
)
from sparing.sharding.planner.workload import BucketSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """What ``fully_shard`` gathers as one: a block, or all that is outside of blocks."""

    shapes: tuple[tuple[int, ...], ...]
    trains: tuple[bool, ...]  # of each
    root: bool = False
    # Place in the forward pass. Of what is outside: -1 if something before the body trains, else behind the last block.
    block: int = 0

    @property
    def trained(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters that train."""
        return tuple(shape for shape, trains in zip(self.shapes, self.trains, strict=True) if trains)


@lru_cache(maxsize=64)
def unit_specs(buckets: tuple[BucketSpec, ...]) -> tuple[UnitSpec, ...]:
    """The units of buckets: all that is outside of blocks, and each block.

    A bucket of which no shapes are known counts as rows of one element.
    """
    units: dict[int | None, list[BucketSpec]] = {}
    for spec in buckets:
        units.setdefault(None if spec.root else spec.block, []).append(spec)
    early = any(spec.trainable and spec.root and spec.block < 0 for spec in buckets)
    outside = -1 if early else 1 + max((spec.block for spec in buckets if not spec.root), default=-1)
    made = []
    for block, specs in units.items():
        pairs = [(shape, spec.trainable) for spec in specs for shape in spec.shapes or ((spec.elements,),)]
        shapes, trains = zip(*pairs, strict=True)
        place = outside if block is None else block
        made.append(UnitSpec(shapes=shapes, trains=trains, root=block is None, block=place))
    return tuple(made)


def shard_level(plan: Plan | str, tiers: int) -> int:
    """Level at which ``fully_shard`` cuts: the parameters', or where those stay whole the optimizer's.

    Whole parameters are then gathered once a step from what the optimizer changes, which stays beside them.
    """
    p, _, os = as_plan(plan).levels(tiers)
    return p or os


def _pieces(shapes: Sequence[Sequence[int]], *ranks: int) -> int:
    """Elements of one rank's pieces, padding included, after cuts of the rows over so many ranks, one after another."""
    total = 0
    for rows, *width in shapes:
        for count in ranks:
            rows = -(-rows // count)
        total += rows * prod(width)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpLive:
    """Bytes that one rank holds between micro-steps, padding included."""

    params: int  # whole parameters under plans that begin with N, else shards
    kept: int  # shards that stay beside whole parameters: what our engine does not hold
    grads: int  # accumulated
    master: int  # values of the optimizer's own: 32-bit ones, and rows finer than the shards
    moments: int

    @property
    def total(self) -> int:
        """All of it (bytes)."""
        return self.params + self.kept + self.grads + self.master + self.moments


def fsdp_live_bytes(
    units: Sequence[UnitSpec],
    sizes: Sizes,
    plan: Plan | str,
    *,
    param_bytes: int = 2,
    grad_bytes: int = 4,
    master_bytes: int = 4,
    moments: int = 2,
) -> FsdpLive:
    """Return what the rank with the most rows holds (bytes); the first rank is one."""
    plan = as_plan(plan)
    p, g, os = plan.levels(len(sizes))
    level = shard_level(plan, len(sizes))
    inner, outer = prod(sizes[:level]), prod(sizes[level:])
    shards = sum(_pieces(unit.shapes, inner) for unit in units)
    rows = sum(_pieces(unit.trained, inner, *((outer,) if os > level else ())) for unit in units)
    separate = os > level or param_bytes != master_bytes
    return FsdpLive(
        params=(shards * inner if p == 0 else shards) * param_bytes,
        kept=shards * param_bytes if p == 0 else 0,
        grads=sum(_accumulated(unit, sizes, level, g, os) for unit in units) * grad_bytes,
        master=rows * master_bytes if separate else 0,
        moments=moments * rows * master_bytes,
    )


def _accumulated(unit: UnitSpec, sizes: Sizes, level: int, g: int, os: int) -> int:
    """Elements of a unit's gradients between micro-steps."""
    if g == 0:
        # torch's own, one for each whole parameter
        return sum(map(prod, unit.trained))
    inner, outer = prod(sizes[:level]), prod(sizes[level:])
    if g > level:
        return _pieces(unit.trained, inner, outer)
    size = _pieces(unit.trained, inner) * inner // prod(sizes[:g])
    return size + -size % prod(sizes[g:])


def fsdp_passing_bytes(
    units: Sequence[UnitSpec],
    sizes: Sizes,
    plan: Plan | str,
    *,
    param_bytes: int = 2,
    grad_bytes: int = 4,
    prefetch: int = 1,
) -> tuple[int, ...]:
    """Return what comes and goes beside ``fsdp_live_bytes``, by block, when its backward pass ends (bytes).

    For a micro-step that is not the last, of which the first rank holds most: parameters of the roots and of the block,
    gathered ones of the blocks before it, gradients of the block, and the flat buffer of the block behind it, which
    torch frees when it next reduces. Gradients of the roots are made as they come, and over two axes what is under way
    has a copy in the other order: neither is counted.
    """
    p, g, os = as_plan(plan).levels(len(sizes))
    inner = prod(sizes[: p or os])
    whole = [_pieces(unit.shapes, inner) * inner * param_bytes if p else 0 for unit in units]
    flat = [_pieces(unit.trained, inner) * inner * grad_bytes if g else 0 for unit in units]
    # without a reduction, torch adds to what is held, unless that is of another type
    made = [sum(map(prod, u.trained)) * param_bytes if g or grad_bytes != param_bytes else 0 for u in units]
    roots = sum(size for size, unit in zip(whole, units, strict=True) if unit.root)
    place = {unit.block: at for at, unit in enumerate(units) if not unit.root}
    first = min((unit.block for unit in units if unit.trained), default=0)

    def passing(block: int) -> int:
        at, behind = place[block], place.get(block + 1)
        ahead = [place[k] for k in range(max(0, first, block - prefetch), block) if k in place]
        return roots + whole[at] + made[at] + sum(whole[k] for k in ahead) + (0 if behind is None else flat[behind])

    return tuple(passing(block) for block in sorted(place))


@dataclass(frozen=True, slots=True)
class _Rings:
    """The rings of one unit."""

    gather: tuple[Part, ...]  # parameters to whole
    step: tuple[Part, ...]  # gradients of a micro-step to their level
    sync: tuple[Part, ...]  # gradients to the optimizer's level, complete
    refresh: tuple[Part, ...]  # new parameters to the shards


def _rings(unit: UnitSpec, sizes: Sizes, plan: Plan) -> _Rings:
    _, g, os = plan.levels(len(sizes))
    level = shard_level(plan, len(sizes))
    inner, outer = prod(sizes[:level]), prod(sizes[level:])
    gather = gather_parts(_pieces(unit.shapes, inner) * inner, sizes, level, 0)
    if not unit.trained:
        return _Rings(gather, (), (), ())
    mine = _pieces(unit.trained, inner)
    # whole tensors of which rows cut twice, or shards that all outer ranks share evenly, would be pieces
    twice, shared = _pieces(unit.trained, inner, outer) * outer * inner, (mine + -mine % outer) * inner
    step, sync = step_parts(mine * inner, sizes, min(g, level)), tuple[Part, ...]()
    to_shards = step_parts(mine * inner, sizes, level) if g == 0 else ()
    if g > level:
        step = (*step, *sync_parts(twice, sizes, level, g))
    elif level == len(sizes):
        sync = sync_parts(mine * inner, sizes, g, os)
    else:
        sync = (*to_shards, *sync_parts(twice if os > level else shared, sizes, level, os))
    return _Rings(gather, step, sync, gather_parts(twice, sizes, os, level) if os > level else ())


def fsdp_traffic(
    units: Sequence[UnitSpec],
    sizes: Sizes,
    plan: Plan | str,
    *,
    accumulate: int = 1,
    gather_bytes: int = 2,
    reduce_bytes: int = 2,
) -> Traffic:
    """Return what each rank sends in one step: the numbers that the counters of the rings must show."""
    plan = as_plan(plan)
    whole = plan.levels(len(sizes))[0] == 0
    known = [BucketSpec(elements=1, trainable=bool(u.trained), root=u.root, block=u.block) for u in units]
    widths = (gather_bytes, gather_bytes, reduce_bytes, reduce_bytes, gather_bytes)
    sent, messages = [[0] * len(sizes) for _ in widths], [0] * len(sizes)
    for unit, backward in zip(units, backward_gathers(known), strict=True):
        rings = _rings(unit, sizes, plan)
        # Whole parameters are gathered once a step, if any of the unit has changed.
        fresh = rings.gather if whole and unit.trained else ()
        times = (0 if whole else accumulate, 0 if whole else backward * accumulate, accumulate, 1, 1)
        causes = (rings.gather, rings.gather, rings.step, rings.sync, (*rings.refresh, *fresh))
        for total, parts, count, width in zip(sent, causes, times, widths, strict=True):
            for part in parts:
                total[part.axis] += part.elements * width * count
                messages[part.axis] += part.messages * count
    return Traffic(*map(tuple, sent), messages=tuple(messages))  # type: ignore[misc]
