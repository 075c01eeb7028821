"""What each rank sends, exactly: every transition between levels as ring collectives on single axes.

A ring all-gather or reduce-scatter over w ranks of a slice of V elements sends V·(w-1)/w elements in w-1 messages from
each rank. Going from one level to another is a sequence of such parts, one axis at a time, and a step of training is a
sequence of transitions: the counters of the rings must show the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from sparing.errors import require
from sparing.sharding.layout import Layout
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.lowbit.blocks import Blocks
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.planner.workload import BucketSpec, Workload

Sizes = tuple[int, ...]


class Part(NamedTuple):
    """One ring collective of one axis, as one rank sees it."""

    axis: int  # 0 innermost
    elements: int  # sent
    messages: int  # sent


class Format(NamedTuple):
    """Of what one cause sends."""

    width: int  # of an element (bytes)
    slow: Blocks | None = None  # on the outermost axis; none: as elsewhere

    def nbytes(self, part: Part, sizes: Sizes) -> int:
        """What one rank sends in a ring (bytes); in low bits each message is a payload of its own."""
        if self.slow is None or part.axis < len(sizes) - 1:
            return part.elements * self.width
        return part.messages * self.slow.nbytes(part.elements // part.messages)


def formats(gather_bytes: int, reduce_bytes: int, slow: LowBit | None) -> tuple[Format, Format, Format, Format]:
    """Formats of the four transitions of ``Rings``."""
    params, grads, changes = Format(gather_bytes), Format(reduce_bytes), Format(gather_bytes)
    if slow is not None:
        grads, changes = Format(reduce_bytes, slow.grads), Format(gather_bytes, slow.changes)
    return params, grads, grads, changes


def _ring(size: int, sizes: Sizes, axis: int) -> tuple[Part, ...]:
    """A ring over one axis of a slice of ``size`` elements; none if the axis has one rank."""
    ranks = sizes[axis]
    return (Part(axis, size // ranks * (ranks - 1), ranks - 1),) if ranks > 1 else ()


def _slice(size: int, sizes: Sizes, level: int) -> int:
    return size // prod(sizes[:level])


@lru_cache(maxsize=4096)
def gather_parts(size: int, sizes: Sizes, frm: int, to: int) -> tuple[Part, ...]:
    """All-gathers from level ``frm`` to the coarser ``to``, outermost first; ``size`` is padded, S."""
    axes = range(frm - 1, to - 1, -1)
    return tuple(part for axis in axes for part in _ring(_slice(size, sizes, axis), sizes, axis))


@lru_cache(maxsize=4096)
def step_parts(size: int, sizes: Sizes, level: int) -> tuple[Part, ...]:
    """Reduce-scatters of full gradients to ``level`` in one micro-step, innermost first."""
    return tuple(part for axis in range(level) for part in _ring(_slice(size, sizes, axis), sizes, axis))


@lru_cache(maxsize=4096)
def sync_parts(size: int, sizes: Sizes, frm: int, to: int) -> tuple[Part, ...]:
    """Rings that complete slices at ``frm``, partial over the outer axes, and cut them to ``to``.

    Reduce-scatters outwards, then all-gathers back to ``to``; at the outermost axis the two are an all-reduce.
    """
    out = [part for axis in range(frm, len(sizes)) for part in _ring(_slice(size, sizes, axis), sizes, axis)]
    return (*out, *gather_parts(size, sizes, len(sizes), to))


def first_trained_block(buckets: Sequence[BucketSpec]) -> float:
    """Place of the first block that has a backward pass; infinity if nothing is trainable."""
    return min((spec.block for spec in buckets if spec.trainable), default=float("inf"))


def backward_gathers(buckets: Sequence[BucketSpec]) -> tuple[int, ...]:
    """How often each bucket is gathered for the backward pass of a micro-step, after once for the forward pass."""
    # Roots are kept from the forward to the end of the backward pass, and so is the last block, which the backward
    # pass needs first. Blocks before everything trainable have no backward pass.
    last = max((spec.block for spec in buckets if not spec.root), default=None)
    first = first_trained_block(buckets)
    return tuple(int(not (spec.root or spec.block == last or spec.block < first)) for spec in buckets)


class Kind(NamedTuple):
    """Buckets that differ in nothing but their place: a model of a hundred blocks has a handful of kinds."""

    spec: BucketSpec  # the first of them
    backward: int  # gathers for the backward pass of a micro-step
    copies: int


def kinds(buckets: Sequence[BucketSpec]) -> list[Kind]:
    """What has to be priced once, and how often it is there."""
    found: dict[tuple[int, bool, Plan | None, int], list[BucketSpec]] = defaultdict(list)
    for spec, backward in zip(buckets, backward_gathers(buckets), strict=True):
        found[spec.elements, spec.trainable, spec.plan, backward].append(spec)
    return [Kind(same[0], backward, len(same)) for (*_, backward), same in found.items()]


class Rings(NamedTuple):
    """The rings of one bucket under its plan; with local steps those of a step inside the group."""

    gather: tuple[Part, ...]  # parameters to level N
    step: tuple[Part, ...]  # gradients of a micro-step to their level; none if frozen
    sync: tuple[Part, ...]  # gradients to the optimizer's level, complete; none if frozen
    refresh: tuple[Part, ...]  # new parameters to their level; none if frozen


def rings_of(spec: BucketSpec, plan: Plan, sizes: Sizes, *, local: bool = False) -> Rings:
    """Rings of the transitions that a bucket can make in a step; its own plan goes first."""
    p, g, os = (spec.plan or plan).levels(len(sizes))
    # Rings send padding, too: counters of the rings must show these numbers.
    padded = Layout(sizes, spec.elements).padded
    gather = gather_parts(padded, sizes, p, 0)
    if not spec.trainable:
        return Rings(gather, (), (), ())
    step, refresh = step_parts(padded, sizes, g), gather_parts(padded, sizes, os, p)
    if not local:
        return Rings(gather, step, sync_parts(padded, sizes, g, os), refresh)
    # A group takes its steps as if it were alone; tensors are padded as for all.
    why, do = "it cuts over all groups, so none could take a step alone", "pass a plan without G"
    require(os < len(sizes), "local steps", f"plan {spec.plan or plan}", why, do)
    return Rings(gather, step, sync_parts(padded, (*sizes[:-1], 1), g, os), refresh)


def outer_rings_of(spec: BucketSpec, plan: Plan, sizes: Sizes) -> tuple[tuple[Part, ...], ...]:
    """Rings of an outer step: the difference of a group, all-reduced; masters to their level; parameters to theirs."""
    if not spec.trainable:
        return (), (), ()
    p, _, os = (spec.plan or plan).levels(len(sizes))
    padded, axis = Layout(sizes, spec.elements).padded, len(sizes) - 1
    # of the slice that the ranks of a group share out
    difference = _ring(_slice(padded, sizes, axis), sizes, axis) * 2
    return difference, gather_parts(padded, sizes, axis, os), gather_parts(padded, sizes, os, p)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends in one step of training: bytes on each axis, innermost first, by cause."""

    params_forward: tuple[int, ...]  # gathered for forward passes (bytes)
    params_backward: tuple[int, ...]  # gathered for backward passes (bytes)
    grads: tuple[int, ...]  # reduced in micro-steps (bytes)
    sync_grads: tuple[int, ...]  # completed and cut to the optimizer's level, once (bytes)
    sync_params: tuple[int, ...]  # new parameters gathered to their own level, once (bytes)
    messages: tuple[int, ...]  # of all causes
    # Of one outer step, once in H steps where groups train alone: differences between groups, and what comes of them
    # inside (bytes, messages); not part of the above.
    outer: tuple[int, ...] = ()
    outer_messages: tuple[int, ...] = ()

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes of all causes on each axis, without an outer step."""
        causes = (self.params_forward, self.params_backward, self.grads, self.sync_grads, self.sync_params)
        return tuple(sum(per_axis) for per_axis in zip(*causes, strict=True))

    @classmethod
    def of_work(cls, workload: Workload, plan: Plan, sizes: Sizes) -> Traffic:
        """What one rank sends in one step of a workload."""
        widths: Any = {"gather_bytes": workload.param_bytes, "reduce_bytes": workload.wire_bytes, "slow": workload.slow}
        return cls.of_step(plan, sizes, workload.buckets(), accumulate=workload.accumulate, **widths)

    @classmethod
    def of_step(
        cls,
        plan: Plan | str,
        sizes: Sizes,
        buckets: Sequence[BucketSpec],
        *,
        accumulate: int = 1,
        gather_bytes: int = 2,
        reduce_bytes: int = 2,
        slow: LowBit | None = None,
        local: LocalSteps | None = None,
        master_bytes: int = 4,
    ) -> Traffic:
        """What one rank sends in one step: the numbers that the counters of the rings must show.

        ``slow`` is the format of gradients and changed parameters on the outermost axis. Activation recomputation
        changes nothing; a bucket's own plan goes before the model's. With ``local`` steps nothing of a step crosses the
        outermost axis; ``outer`` is what an outer step sends, of elements as wide as masters.
        """
        plan, (whole, step, sync, refresh) = as_plan(plan), formats(gather_bytes, reduce_bytes, slow)
        sent, messages = [[0] * len(sizes) for _ in range(5)], [0] * len(sizes)
        outer, outer_messages = [0] * len(sizes), [0] * len(sizes)
        few = None if local is None or local.wire is None else local.wire.grads
        exchange = (Format(master_bytes, few), Format(master_bytes), refresh)
        for spec, backward, copies in kinds(buckets):
            rings = rings_of(spec, plan, sizes, local=local is not None)
            if local is not None:
                for parts, form in zip(outer_rings_of(spec, plan, sizes), exchange, strict=True):
                    for part in parts:
                        outer[part.axis] += form.nbytes(part, sizes) * copies
                        outer_messages[part.axis] += part.messages * copies
            # In the order of the fields: gathers forward and backward, gradients, and once a step the two syncs.
            causes = (rings.gather, rings.gather, rings.step, rings.sync, rings.refresh)
            times = (accumulate, backward * accumulate, accumulate, 1, 1)
            each = (whole, whole, step, sync, refresh)
            for total, parts, count, form in zip(sent, causes, times, each, strict=True):
                for part in parts:
                    total[part.axis] += form.nbytes(part, sizes) * count * copies
                    messages[part.axis] += part.messages * count * copies
        meeting = {"outer": tuple(outer), "outer_messages": tuple(outer_messages)} if local is not None else {}
        return cls(*map(tuple, sent), messages=tuple(messages), **meeting)  # type: ignore[misc]
