"""The plan that picks itself: every plan simulated, those that do not fit set aside, and a reason for each that lost.

choice = choose(Workload(params=65e9, accumulate=10), Topology(groups=4, per_group=8, inter="80Gbps",
                intra="2000Gbps"), memory="80GB")
choice.plan, [(verdict.plan.name, verdict.why) for verdict in choice.ranking]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from sparing.errors import UserError, require
from sparing.memory.sizes import parse_bytes
from sparing.sharding.config import Link, Topology, Workload
from sparing.sharding.levels import Plan, as_plan, effective
from sparing.sharding.prediction import Price, predict
from sparing.sharding.simulation import Timeline, simulate

TIE = 0.001  # relative: closer times are equal, and messages, then slow bytes, then memory decide


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


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a plan must keep to."""

    topology: Topology
    memory: int | None
    survives: int
    tie: float

    def against(self, price: Price) -> str:
        """Why a plan is out of the question; empty if it is not."""
        tiers = self.topology.tiers
        if self.survives and max(price.plan.levels(tiers)) == tiers:
            return "loses state with a group: what is at G exists once"
        if self.memory is not None and price.memory > self.memory:
            return f"{_gigabytes(price.memory - self.memory)} too much"
        return ""


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
        workload: The model and how it is trained.
        topology: The machine.
        memory: Memory of a rank: bytes, or text with a unit; none: no limit.
        top: Keep only so many verdicts.
        survives: Groups that may be lost without losing state: plans that keep a copy in every group.
        tie: Relative difference of times below which messages decide, then bytes on the outermost axis, then memory.
        plans: Those to choose from; none: all effective ones of the machine's tiers.

    Returns:
        The plan, and a verdict with a reason on every one.

    Raises:
        UserError: If nothing fits, or no plan can survive what it must.

    Example:
        >>> machine = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
        >>> choose(Workload(params=65e9, accumulate=10), machine, memory="80GB").plan.name
        'IIG'
    """
    limit = None if memory is None else parse_bytes(memory if isinstance(memory, str) else int(memory))
    outer = topology.axes[-1]
    why = f"there are {outer.size} groups along {outer.name}, and one must be left"
    require(0 <= survives < max(outer.size, 1), "survives", survives, why, f"pass 0 to {outer.size - 1}")
    rules = _Rules(topology, limit, survives, tie)
    candidates = effective(topology.tiers) if plans is None else tuple(map(as_plan, plans))
    require(bool(candidates), "plans", "none", "there is nothing to choose from", "pass plans")
    found = [_judge(workload, topology, plan, rules) for plan in candidates]
    fit = _ranked([verdict for verdict in found if verdict.fits], tie)
    if not fit:
        _refuse(found, limit)
    ranked = [replace(verdict, why=_reason(verdict, fit[0], rules)) for verdict in fit]
    rest = sorted((verdict for verdict in found if not verdict.fits), key=lambda verdict: verdict.seconds)
    return Choice(
        plan=fit[0].plan, ranking=tuple([*ranked, *rest][:top]), workload=workload, topology=topology, memory=limit
    )


def _judge(workload: Workload, topology: Topology, plan: Plan, rules: _Rules) -> Verdict:
    price, timeline = predict(workload, topology, plan), simulate(workload, topology, plan)
    against = rules.against(price)
    return Verdict(
        plan=plan,
        fits=not against,
        seconds=timeline.seconds,
        memory=price.memory,
        why=against,
        price=price,
        timeline=timeline,
    )


def _ranked(verdicts: list[Verdict], tie: float) -> list[Verdict]:
    """Verdicts from best to worst: repeatedly the plainest among the fastest."""
    left, ranked = list(verdicts), []
    while left:
        near = min(verdict.seconds for verdict in left) * (1 + tie)
        best = min((v for v in left if v.seconds <= near), key=_plain)
        left.remove(best)
        ranked.append(best)
    return ranked


def _plain(verdict: Verdict) -> tuple[int, int, int]:
    """What decides between equally fast plans: messages on all axes, bytes on the outermost, memory."""
    traffic = verdict.price.traffic
    return sum(traffic.messages), traffic.total[-1], verdict.memory


def _reason(verdict: Verdict, best: Verdict, rules: _Rules) -> str:
    """Why a plan that fits was chosen, or lost against the best."""
    if verdict is best:
        return "the fastest that fits" if rules.memory is not None else "the fastest"
    if verdict.seconds <= best.seconds * (1 + rules.tie):
        return f"same time, {_more(verdict, best, rules.topology)} ({verdict.plan} beside {best.plan})"
    return f"{_slower(verdict.seconds, best.seconds)}: {_where(verdict.timeline, best.timeline, rules.topology)}"


def _more(verdict: Verdict, best: Verdict, topology: Topology) -> str:
    """What an equally fast plan has more of."""
    messages, sent, held = (mine - other for mine, other in zip(_plain(verdict), _plain(best), strict=True))
    if messages:
        return "1 message more" if messages == 1 else f"{messages} messages more"
    if sent:
        return f"{_gigabytes(sent)} more on the {topology.axes[-1].name} link"
    return f"{_gigabytes(held)} more memory" if held else "same messages, same memory"


def _where(mine: Timeline, best: Timeline, topology: Topology) -> str:
    """The axis on which time is lost, by waiting or, where nothing overlaps, by sending; or the work that costs it."""
    if mine.cores >= mine.seconds:
        return f"{mine.cores - best.cores:.3g} s more work for the cores"
    waits = [a - b for a, b in zip(mine.exposed, best.exposed, strict=True)]
    sends = [a - b for a, b in zip(mine.busy, best.busy, strict=True)]
    lost = waits if max(waits) > 0 else sends
    axis = max(range(len(lost)), key=lost.__getitem__)
    return f"{lost[axis]:.3g} s more on the {topology.axes[axis].name} link"


def _slower(seconds: float, best: float) -> str:
    if best <= 0:
        return f"{seconds:.3g} s slower"
    ratio = seconds / best
    return f"{ratio:.1f}× slower" if ratio >= 1.1 else f"{100 * (ratio - 1):.1f} % slower"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.3g} MB"


def _refuse(found: list[Verdict], limit: int | None) -> NoReturn:
    """Say why nothing is left to choose."""
    smallest = min(found, key=lambda verdict: verdict.memory)
    got = "no limit" if limit is None else _gigabytes(limit)
    if limit is None or smallest.memory <= limit:
        why, do = "every plan that fits has state that exists once", "pass survives=0 or more memory"
    else:
        need = _gigabytes(smallest.memory)
        why, do = f"the smallest plan, {smallest.plan}, needs {need}", "take more ranks, or checkpoint activations"
    raise UserError("memory", got=got, why=why, do=do)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best plan at one point of a map."""

    ratio: float  # B'/B, speed inside a group over speed between groups
    accumulate: int  # micro-steps, s
    trainable: float  # share of trainable parameters, Ψ'/Ψ
    plan: Plan | None  # None if nothing fits
    seconds: float | None  # of one step under it


def crossover(
    workload: Workload,
    topology: Topology,
    *,
    ratios: Sequence[float] = (1, 5, 25),
    accumulates: Sequence[int] = (1, 4, 10),
    trainables: Sequence[float] = (1, 1 / 16, 3 / 1000),
    memory: str | float | None = None,
) -> tuple[Cell, ...]:
    """The best plan as a function of link ratio B'/B, micro-steps and trainable share, the last changing fastest.

    They replace those of ``workload`` and the rate of the outermost axis; real buckets keep their own trainable share.
    """
    shares = (float(workload.trainable / workload.params),) if workload.specs else trainables
    return tuple(
        _cell(workload, _uneven(topology, ratio), ratio, accumulate, share, memory)
        for ratio in ratios
        for accumulate in accumulates
        for share in shares
    )


def _cell(
    workload: Workload, topology: Topology, ratio: float, accumulate: int, share: float, memory: str | float | None
) -> Cell:
    trainable = workload.trainable if workload.specs else share
    work = replace(workload, accumulate=accumulate, trainable=trainable)
    try:
        best = choose(work, topology, memory, top=1).best
    # the only mistake left to report: nothing fits
    except UserError:
        return Cell(ratio=ratio, accumulate=accumulate, trainable=share, plan=None, seconds=None)
    return Cell(ratio=ratio, accumulate=accumulate, trainable=share, plan=best.plan, seconds=best.seconds)


def _uneven(topology: Topology, ratio: float) -> Topology:
    """The machine with its outermost axis ``ratio`` times slower than the innermost."""
    outer: Link = replace(topology.axes[-1], rate=topology.axes[0].rate / ratio)
    return Topology(axes=(*topology.axes[:-1], outer), overlap=topology.overlap)
