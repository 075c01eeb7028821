"""Ways to use the same wires, each with its best plan: two levels, a flat ring, few bits between groups, local steps.

They do not give the same training: flat rings add in another order, few bits round, and groups that meet once in many
steps are another algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from sparing.errors import UserError
from sparing.memory.sizes import parse_bytes
from sparing.sharding.layout import Layout
from sparing.sharding.levels import Plan, effective
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.planner.choose import TIE, choose
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.flat import flat_passes, outermost_axis
from sparing.sharding.planner.local_choices import local_choices
from sparing.sharding.planner.prediction import predict
from sparing.sharding.planner.simulation import simulate
from sparing.sharding.planner.traffic import formats, kinds, rings_of

TWO_LEVEL = "two-level"
FLAT = "flat ring"
ACCUMULATOR = 4  # bytes of a gradient's sum that low-bit wires need, since 16 bits would lose what is owed

LOCAL = {
    "local steps, 8": LocalSteps(every=8),
    "local steps, 32, int8": LocalSteps(every=32, wire=LowBit(bits=8)),
}
"""Steps between two meetings of the groups, as usual where links are slow (arXiv:2311.08105), and where they crawl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireChoice:
    """The best plan on one way to use the wires."""

    name: str  # "two-level", "flat ring", "int8", "int4", or one of LOCAL
    slow: LowBit | None  # format between groups; none: exact
    plan: Plan | None  # the fastest that fits; none: nothing does, or the way cannot run
    seconds: float | None  # of one step
    memory: int | None  # most that a rank holds (bytes)
    leaving: int | None  # from each group in one step (bytes)
    why: str  # what it gives, or why it is out of the question


def wire_choices(
    workload: Workload, topology: Topology, memory: str | float | None = None, *, survives: int = 0
) -> tuple[WireChoice, ...]:
    """The best plan on rings in two levels, on a flat ring, with 8 and 4 bits between groups, and with local steps.

    Low-bit wires are priced with gradients that are summed and sent inside groups in 32 bits, as they need. Every plan
    of local steps keeps a copy of everything in each group, so any number of groups may be lost. Both are of our own
    engine, whose memory is theirs.
    """
    exact = replace(workload, slow=None)
    summed = replace(
        exact, grad_bytes=max(exact.grad_bytes, ACCUMULATOR), wire_bytes=max(exact.wire_bytes, ACCUMULATOR)
    )
    base = _best(TWO_LEVEL, exact, topology, memory, survives)
    ways = [_flat(exact, topology, memory, survives)]
    ways += [
        _best(f"int{bits}", replace(summed, slow=LowBit(bits=bits), engine="sparing"), topology, memory, survives)
        for bits in (8, 4)
    ]
    ways += [_local(name, exact, topology, memory) for name in LOCAL]
    return (base, *(_beside(way, base) for way in ways))


def _best(name: str, work: Workload, topology: Topology, memory: str | float | None, survives: int) -> WireChoice:
    """Rings in two levels, in the workload's own formats."""
    if work.slow is not None and topology.axes[-1].size == 1:
        return _none(name, work.slow, "there is one group, so nothing crosses the outermost axis")
    try:
        best = choose(work, topology, memory, top=1, survives=survives).best
    except UserError as refused:
        return _none(name, work.slow, refused.why)
    return WireChoice(
        name=name, slow=work.slow, plan=best.plan, seconds=best.seconds, memory=best.memory,
        leaving=leaving_bytes(work, topology, best.plan), why="as the library does unless told otherwise",
    )  # fmt: skip


def _flat(work: Workload, topology: Topology, memory: str | float | None, survives: int) -> WireChoice:
    """One ring over all ranks wherever a collective spans all axes."""
    if sum(size > 1 for size in topology.sizes) < 2:
        return _none(FLAT, None, "there is one kind of link, whose rings are flat")
    limit = None if memory is None else parse_bytes(memory if isinstance(memory, str) else int(memory))
    prices = [predict(work, topology, plan) for plan in effective(topology.tiers)]
    # plans with a copy of everything in each group, where groups may be lost
    able = [p for p in prices if not survives or max(p.plan.levels(topology.tiers)) < topology.tiers]
    fit = [price for price in able if limit is None or price.memory <= limit]
    if not fit:
        return _none(FLAT, None, "nothing fits")
    times = {price.plan: simulate(work, topology, price.plan, flat=True).seconds for price in fit}
    near = min(times.values()) * (1 + TIE)
    price = min((p for p in fit if times[p.plan] <= near), key=lambda p: (-p.slices[0], -p.slices[1], p.memory))
    return WireChoice(
        name=FLAT, slow=None, plan=price.plan, seconds=times[price.plan], memory=price.memory,
        leaving=leaving_bytes(work, topology, price.plan, flat=True), why="",
    )  # fmt: skip


def _local(name: str, work: Workload, topology: Topology, memory: str | float | None) -> WireChoice:
    """Groups that meet once in a while; bytes and seconds have their share of a meeting."""
    if topology.axes[-1].size == 1:
        return _none(name, None, "there is one group, so nothing crosses the outermost axis")
    (price,) = local_choices(work, topology, [LOCAL[name]], memory)
    if price is None:
        return _none(name, None, "nothing fits")
    return WireChoice(
        name=name, slow=LOCAL[name].wire, plan=price.plan, seconds=price.seconds, memory=price.memory,
        leaving=round(price.leaving), why="",
    )  # fmt: skip


def leaving_bytes(workload: Workload, topology: Topology, plan: Plan, *, flat: bool = False) -> int:
    """What leaves each group of the outermost axis in one step (bytes): of a flat ring, what one rank passes on."""
    sizes, total = topology.sizes, 0
    outermost = outermost_axis(sizes)
    inside, forms = prod(sizes[:outermost]), formats(workload.param_bytes, workload.wire_bytes, workload.slow)
    for spec, backward, copies in kinds(workload.buckets()):
        passes = flat_passes(spec, plan, sizes) if flat else (0, 0, 0, 0)
        times = (workload.accumulate * (1 + backward), workload.accumulate, 1, 1)
        # all blocks but its own pass the rank that sends out of its group
        around = Layout(sizes, spec.elements).padded // topology.world * (topology.world - 1)
        for parts, form, count, often in zip(rings_of(spec, plan, sizes), forms, passes, times, strict=True):
            outer = sum(form.nbytes(part, sizes) for part in parts if part.axis == outermost)
            total += copies * often * (count * around * form.width if count else inside * outer)
    return total


def _beside(way: WireChoice, base: WireChoice) -> WireChoice:
    """The way with a word on what it gives."""
    if way.seconds is None or base.seconds is None:
        return way
    ratio = base.seconds / way.seconds if way.seconds else 1.0
    pace = f"{ratio:.2g}× as fast" if ratio > 1 + TIE else f"{1 / ratio:.2g}× as long" if ratio < 1 - TIE else "as long"
    cost = "sums in another order" if way.slow is None else "rounds gradients and changes of parameters"
    if way.name in LOCAL:
        cost = f"groups meet once in {LOCAL[way.name].every} steps: another algorithm"
    return replace(way, why=f"{pace}; {cost}")


def _none(name: str, slow: LowBit | None, why: str) -> WireChoice:
    return WireChoice(name=name, slow=slow, plan=None, seconds=None, memory=None, leaving=None, why=why)
