"""The plan that picks itself: every plan simulated, those that do not fit omitted, and a reason for each that lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from sparing.errors import UserError, require
from sparing.memory.sizes import parse_bytes
from sparing.sharding.levels import Plan, as_plan, effective
from sparing.sharding.planner.config import Link, Topology, Workload
from sparing.sharding.planner.prediction import Price, predict
from sparing.sharding.planner.simulation import Timeline, least_seconds, simulate

TIE = 0.001  # relative: closer times are equal, and then what ``plainness`` says decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found out about one plan."""

    plan: Plan
    fits: bool  # the memory, and survives what it must
    seconds: float  # of one step
    memory: int  # most that a rank holds (bytes)
    why: str  # it was chosen or lost, in one line
    price: Price  # memory by kind, traffic by axis and cause
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best plan and what became of the others."""

    plan: Plan  # the fastest that fits; of equally fast ones the one with the fewest messages
    ranking: tuple[Verdict, ...]  # those that fit from best to worst, then the others by time
    workload: Workload
    topology: Topology
    memory: int | None  # of a rank (bytes); None: no limit

    @property
    def best(self) -> Verdict:
        """The verdict on the chosen plan."""
        return self.ranking[0]


def choose(
    workload: Workload,
    topology: Topology,
    memory: str | float | None = None,
    top: int | None = None,
    *,
    survives: int = 0,
    tie: float = TIE,
    plans: Sequence[Plan | str] | None = None,
) -> Choice:
    """Find the fastest plan that fits.

    Args:
        workload: The model and how it is trained, and by which engine, whose memory counts.
        topology: The machine.
        memory: Memory of a rank: bytes, or text with a unit; none: no limit.
        top: Keep only this many verdicts; with 1, plans that a bound rules out are not simulated.
        survives: Groups that may be lost without losing state: plans that keep a copy in every group.
        tie: Relative difference of times below which messages decide, then bytes on the outermost axis, then how little
            parameters and gradients are cut, then memory.
        plans: Those to choose from; none: all effective ones of the machine's tiers.

    Returns:
        The plan, and a verdict with a reason on every one.

    Raises:
        UserError: If nothing fits, or no plan survives the loss of so many groups.

    Example:
        >>> machine = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
        >>> choose(Workload(params=65e9, accumulate=10), machine, memory="80GB").plan.name
        'IIG'
    """
    limit = None if memory is None else parse_bytes(memory if isinstance(memory, str) else int(memory))
    outer = topology.axes[-1]
    why = f"there are {outer.size} groups along {outer.name}, and one must be left"
    require(0 <= survives < max(outer.size, 1), "survives", survives, why, f"pass 0 to {outer.size - 1}")
    candidates = effective(topology.tiers) if plans is None else tuple(map(as_plan, plans))
    require(bool(candidates), "plans", "none", "there is nothing to choose from", "pass plans")
    prices = [predict(workload, topology, plan) for plan in candidates]
    against = [_against(price, topology, limit, survives, workload) for price in prices]
    if all(against):
        raise _nothing_fits(prices, limit, survives)
    judged = list(zip(prices, against, strict=True))
    if top == 1:
        found = _contenders(workload, topology, [price for price, why in judged if not why], tie)
    else:
        found = [_verdict(price, simulate(workload, topology, price.plan), why) for price, why in judged]
    left, fit = [verdict for verdict in found if verdict.fits], []
    while left:  # repeatedly the plainest among the fastest
        near = min(verdict.seconds for verdict in left) * (1 + tie)
        fit.append(
            min((verdict for verdict in left if verdict.seconds <= near), key=lambda verdict: plainness(verdict.price))
        )
        left.remove(fit[-1])
    first = "the fastest that fits" if limit is not None else "the fastest"
    others = [replace(verdict, why=_lost(verdict, fit[0], topology, tie)) for verdict in fit[1:]]
    ranked = [replace(fit[0], why=first), *others]
    rest = sorted((verdict for verdict in found if not verdict.fits), key=lambda verdict: verdict.seconds)
    return Choice(
        plan=fit[0].plan, ranking=tuple([*ranked, *rest][:top]), workload=workload, topology=topology, memory=limit
    )


def _against(price: Price, topology: Topology, limit: int | None, survives: int, workload: Workload) -> str:
    """Why a plan is out of the question; empty if it is not."""
    lags = workload.slow is not None and workload.slow.changes is not None
    if lags and price.plan.levels(topology.tiers)[0] == topology.tiers:
        return "low-bit wires carry changes, which parameters at G have nobody to add to"
    if survives and max(price.plan.levels(topology.tiers)) == topology.tiers:
        return "loses state with a group: what is at G exists once"
    if limit is not None and price.memory > limit:
        return f"{_gigabytes(price.memory - limit)} too much"
    return ""


def _contenders(workload: Workload, topology: Topology, prices: Sequence[Price], tie: float) -> list[Verdict]:
    """Verdicts on the fastest and its equals, and perhaps on others: simulated while the bound allows them to win."""
    least = [least_seconds(workload, topology, price) for price in prices]
    found: dict[int, Verdict] = {}
    for at in sorted(range(len(prices)), key=least.__getitem__):
        quickest = min((verdict.seconds for verdict in found.values()), default=math.inf)
        if least[at] > quickest * (1 + tie):
            break
        found[at] = _verdict(prices[at], simulate(workload, topology, prices[at].plan), "")
    # In the order of the plans, which decides between equals.
    return [found[at] for at in sorted(found)]


def _verdict(price: Price, timeline: Timeline, why: str) -> Verdict:
    return Verdict(
        plan=price.plan, fits=not why, seconds=timeline.seconds, memory=price.memory, why=why, price=price,
        timeline=timeline,
    )  # fmt: skip


def plainness(price: Price) -> tuple[int, int, int, int, int]:
    """What decides between equally fast plans, in this order; less is better.

    Messages on all axes, bytes on the outermost, parameters and gradients not held whole, and memory.
    """
    traffic = price.traffic
    params, grads = price.slices
    return sum(traffic.messages), traffic.total[-1], -params, -grads, price.memory


def _lost(verdict: Verdict, best: Verdict, topology: Topology, tie: float) -> str:
    """Why a plan that fits lost against the best."""
    if verdict.seconds <= best.seconds * (1 + tie):
        pairs = zip(plainness(verdict.price), plainness(best.price), strict=True)
        messages, sent, params, grads, held = (mine - other for mine, other in pairs)
        if messages:
            more = "1 message more" if messages == 1 else f"{messages} messages more"
        elif sent:
            more = f"{_gigabytes(sent)} more on the {topology.axes[-1].name} link"
        elif params or grads:
            more = f"{'parameters' if params else 'gradients'} cut more finely"
        else:
            more = f"{_gigabytes(held)} more memory" if held else "same messages, same memory"
        return f"same time, {more} ({verdict.plan} beside {best.plan})"
    ratio = verdict.seconds / best.seconds if best.seconds > 0 else 0.0
    slower = f"{ratio:.1f}× slower" if ratio >= 1.1 else f"{100 * (ratio - 1):.1f} % slower"
    mine, theirs = verdict.timeline, best.timeline
    # Time is lost by the cores' work, or on an axis: by waiting for it or, where nothing overlaps, by sending.
    if mine.cores >= mine.seconds:
        where = f"{mine.cores - theirs.cores:.3g} s more work for the cores"
    else:
        waits = [a - b for a, b in zip(mine.exposed, theirs.exposed, strict=True)]
        sends = [a - b for a, b in zip(mine.busy, theirs.busy, strict=True)]
        lost = waits if max(waits) > 0 else sends
        axis = max(range(len(lost)), key=lost.__getitem__)
        where = f"{lost[axis]:.3g} s more on the {topology.axes[axis].name} link"
    return f"{slower if ratio else f'{verdict.seconds:.3g} s slower'}: {where}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"


def _nothing_fits(prices: Sequence[Price], limit: int | None, survives: int) -> UserError:
    """Return the error that says why nothing is left to choose."""
    smallest = min(prices, key=lambda price: price.memory)
    got = "no limit" if limit is None else _gigabytes(limit)
    if limit is None or smallest.memory <= limit:
        why, do = "every plan that fits has state that exists once", "pass survives=0 or more memory"
        if not survives:
            why, do = "low-bit wires cannot carry parameters at G", "pass other plans, or Workload(slow=None)"
    else:
        need = _gigabytes(smallest.memory)
        why, do = f"the smallest plan, {smallest.plan}, needs {need}", "take more ranks, or checkpoint activations"
    return UserError("memory", got=got, why=why, do=do)


def with_ratios(topology: Topology, ratio: float, middle: float | None = None) -> Topology:
    """The machine with another outermost speed: that of the links just inside over it is ``ratio``.

    Before that ``middle`` sets the speed of the second axis: that of the innermost over it.
    """
    axes: list[Link] = list(topology.axes)
    if middle is not None:
        axes[1] = replace(axes[1], rate=axes[0].rate / middle)
    axes[-1] = replace(axes[-1], rate=axes[max(len(axes) - 2, 0)].rate / ratio)
    return replace(topology, axes=tuple(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best plan at one point of a map."""

    ratio: float  # B'/B, speed of the links just inside the outermost over that of the outermost
    accumulate: int  # micro-steps, s
    trainable: float  # share of trainable parameters, Ψ'/Ψ
    plan: Plan | None  # None if nothing fits
    seconds: float | None  # of one step under it
    middle: float | None = None  # speed of the innermost links over that of the middle ones, where it was varied


def crossover(
    workload: Workload,
    topology: Topology,
    *,
    ratios: Sequence[float] = (1, 5, 25),
    accumulates: Sequence[int] = (1, 4, 10),
    trainables: Sequence[float] = (1, 1 / 16, 3 / 1000),
    middles: Sequence[float] = (),
    memory: str | float | None = None,
) -> tuple[Cell, ...]:
    """The best plan as a function of link ratio B'/B, micro-steps and trainable share, the last changing fastest.

    They replace those of ``workload`` and the rate of the outermost axis; real buckets keep their own trainable share.
    On three axes ``middles`` also varies, slowest of all, the rate of the middle one: that of the innermost over it.
    """
    why = "only a machine of three axes has a middle one"
    require(not middles or topology.tiers == 3, "middles", list(middles), why, "leave it out, or pass three axes")
    shares = (float(workload.trainable / workload.params),) if workload.specs else trainables
    cells = []
    for middle, ratio, accumulate, share in product(middles or (None,), ratios, accumulates, shares):
        machine = with_ratios(topology, ratio, middle)
        trainable = workload.trainable if workload.specs else share
        best: Verdict | None = None
        # The only mistake left to report is that nothing fits.
        with suppress(UserError):
            work = replace(workload, accumulate=accumulate, trainable=trainable)
            best = choose(work, machine, memory, top=1).best
        found = {"plan": best and best.plan, "seconds": best and best.seconds, "middle": middle}
        cells.append(Cell(ratio=ratio, accumulate=accumulate, trainable=share, **found))  # type: ignore[arg-type]
    return tuple(cells)
