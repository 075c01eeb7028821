"""One rank through one step of training, event by event: what the wires cost beyond what hides behind computation.

All ranks do the same, so one stands for ten thousand. It has one worker that computes and one lane per axis that runs
rings in the order they were submitted; both parts of a collective over two axes are queued at once, the second behind
the first. The worker does what the engine does: it gathers blocks ahead, sends the gradients of a block when the
backward pass of the block before begins, completes them behind the last backward pass, after which whole sums come
back, and leaves the gathering of new parameters to the next forward pass. Every time is then a maximum of earlier ones,
and no clock has to tick. Where ranks crowd on few cores, the step takes no less than these need for the work of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparing.errors import require
from sparing.sharding.layout import Layout
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
from sparing.sharding.planner.flat import flat_passes, flat_seconds, outermost_axis
from sparing.sharding.planner.prediction import Price
from sparing.sharding.planner.traffic import Traffic, first_trained_block, formats, rings_of

# Times within this share of each other are equal: which axis a wait counts for must not depend on rounding.
EQUAL = 1e-12

Timed = tuple[tuple[int, float], ...]  # rings of a transition: axis and seconds
Rings5 = tuple[Timed, Timed, Timed, Timed, Timed]  # of gather, step, sync, return and refresh


class _Ring(NamedTuple):
    """One ring that was submitted, and what it had to wait for."""

    axis: int
    start: float
    end: float
    cause: _Ring | None


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of work, for a picture of the step."""

    lane: str  # "compute" or the name of an axis
    name: str  # such as "gather 3"
    start: float  # seconds
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step in the steady state, from the end of the optimizer's step to the end of the next."""

    seconds: float  # the step
    compute: float  # arithmetic in it, the optimizer's and the engine's own work included (s)
    exposed: tuple[float, ...]  # waiting for each axis, innermost first (s)
    busy: tuple[float, ...]  # time each axis sends (s)
    # What the cores of a machine need for the arithmetic and messages of all its ranks (s); 0 if not counted.
    cores: float = 0.0
    events: tuple[Event, ...] = ()  # in order of submission, if asked for


@dataclass(slots=True, eq=False)
class _Bucket:
    """Rings of a bucket, and those under way."""

    name: str
    root: bool
    block: int
    gather: Timed
    step: Timed
    sync: Timed
    back: Timed
    refresh: Timed
    pending: _Ring | None = None
    whole: _Ring | None = None
    gathered: bool = False
    reduction: _Ring | None = None
    synced: _Ring | None = None


@dataclass(slots=True, eq=False)
class _Rank:
    """The worker's clock and the lanes."""

    names: tuple[str, ...]
    trace: bool
    now: float = 0.0
    lanes: list[_Ring | None] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def submit(self, rings: Timed, after: _Ring | None, name: str) -> _Ring | None:
        """Queue rings now, each behind the one before; return the last, or what was waited for if there is none."""
        for axis, seconds in rings:
            ahead = self.lanes[axis]
            cause = ahead if after is None or (ahead is not None and ahead.end > after.end * (1 + EQUAL)) else after
            start = self.now
            for ring in (ahead, after):
                if ring is not None and ring.end > start:
                    start = ring.end
            self.lanes[axis] = after = _Ring(axis, start, start + seconds, cause)
            self.busy[axis] += seconds
            if self.trace:
                self.events.append(Event(self.names[axis], name, start, after.end))
        return after

    def wait(self, ring: _Ring | None) -> None:
        """Wait for a ring; the time counts for whichever ring was running on the way to its end."""
        if ring is None or ring.end <= self.now:
            return
        until = ring.end
        at: _Ring | None = ring
        while at is not None and at.end > self.now:
            self.exposed[at.axis] += at.end - max(at.start, self.now)
            at = at.cause
        self.now = until

    def sums(self) -> list[float]:
        """The clock and everything else that only grows."""
        return [self.now, *self.busy, *self.exposed]

    def compute(self, seconds: float, name: str) -> None:
        if self.trace and seconds:
            self.events.append(Event("compute", name, self.now, self.now + seconds))
        self.now += seconds


@dataclass(slots=True, eq=False)
class _Step:
    """The order of a step; the stages are the body blocks."""

    rank: _Rank
    roots: list[_Bucket]
    stages: list[list[_Bucket]]
    first_trained: int
    workload: Workload
    per_pass: float  # what the engine adds to a pass of a block (s)
    reducing: list[_Ring | None] = field(default_factory=list)

    def micro_step(self, *, last: bool) -> None:
        self._forward()
        self._backward(last=last)
        for stage in (self.roots, *self.stages):
            _free(stage)

    def _forward(self) -> None:
        rank, stages, ahead = self.rank, self.stages, self.workload.prefetch
        self._gather([self.roots, *stages[:ahead]])
        self._use(self.roots)
        each = self.workload.forward / max(len(stages), 1)
        for at, stage in enumerate(stages):
            self._gather(stages[at : at + 1 + ahead])
            self._use(stage)
            rank.compute(each + self.per_pass, f"forward {at}")
            # the last stage stays whole, because backward begins with it
            if at != len(stages) - 1:
                _free(stage)
        if not stages:
            rank.compute(each, "forward")

    def _backward(self, *, last: bool) -> None:
        rank, stages, ahead, first = self.rank, self.stages, self.workload.prefetch, self.first_trained
        each = self.workload.backward / max(len(stages) - first, 1)
        # the engine waits for the buffers of the pass before
        while self.reducing:
            rank.wait(self.reducing.pop(0))
        for at in range(len(stages) - 1, first - 1, -1):
            if at + 1 < len(stages):
                self._send(stages[at + 1], last=last)
            self._gather([stages[below] for below in range(at, max(at - ahead, first) - 1, -1)])
            self._use(stages[at])
            rank.compute(each + self.per_pass, f"backward {at}")
        if first < len(stages):
            self._send(stages[first], last=last)
        else:
            rank.compute(each, "backward")
        self._send(self.roots, last=last)

    def _gather(self, stages: Sequence[list[_Bucket]]) -> None:
        for stage in stages:
            for bucket in stage:
                if not bucket.gathered:
                    bucket.gathered = True
                    bucket.whole = self.rank.submit(bucket.gather, bucket.pending, f"gather {bucket.name}")

    def _use(self, stage: list[_Bucket]) -> None:
        for bucket in stage:
            self.rank.wait(bucket.whole)

    def _send(self, stage: list[_Bucket], *, last: bool) -> None:
        """Reduce gradients once there is a free buffer; after the last backward pass complete them."""
        _free(stage)
        for bucket in stage:
            if bucket.step:
                while len(self.reducing) >= max(self.workload.grad_buffers - 1, 1):
                    self.rank.wait(self.reducing.pop(0))
                bucket.reduction = self.rank.submit(bucket.step, None, f"reduce {bucket.name}")
                self.reducing.append(bucket.reduction)
            if last:
                bucket.synced = self.rank.submit(bucket.sync, bucket.reduction, f"sync {bucket.name}")

    def steady(self) -> tuple[float, ...]:
        """What the next micro-step can see of the past, counted from now (s)."""
        rings = (*self.rank.lanes, *self.reducing)
        return tuple(0.0 if ring is None else max(ring.end - self.rank.now, 0.0) for ring in rings)


def _free(stage: list[_Bucket]) -> None:
    for bucket in stage:
        bucket.gathered = False


def _buckets(workload: Workload, topology: Topology, plan: Plan, *, flat: bool) -> list[_Bucket]:
    """The buckets with their rings timed; equal ones are timed once."""
    known: dict[tuple[int, bool, Plan | None], Rings5] = {}
    made = []
    forms, axes = formats(workload.param_bytes, workload.wire_bytes, workload.slow), topology.axes
    for spec in workload.buckets():
        key = (spec.elements, spec.trainable, spec.plan)
        if key not in known:
            rings = rings_of(spec, plan, topology.sizes)
            gather, reduce_, sync, refresh = (
                tuple((p.axis, axes[p.axis].seconds(form.nbytes(p, topology.sizes), p.messages)) for p in parts)
                for parts, form in zip(rings, forms, strict=True)
            )
            # After the all-reduce over the outermost axis, sums come back by gathers over the axes inside it, which
            # wait for the backward pass.
            active = sum(size > 1 for size in topology.sizes[(spec.plan or plan).levels(topology.tiers)[2] :])
            cut = len(sync) - (max(active - 1, 0) if spec.trainable else 0)
            known[key] = gather, reduce_, sync[:cut], sync[cut:], refresh
            if flat:
                known[key] = _flattened(known[key], spec, plan, workload, topology)
        name = "root" if spec.root else str(spec.block)
        gather, reduce_, out, back, refresh = known[key]
        made.append(_Bucket(name, spec.root, spec.block, gather, reduce_, out, back, refresh))
    return made


def _flattened(timed: Rings5, spec: BucketSpec, plan: Plan, workload: Workload, topology: Topology) -> Rings5:
    """Rings of which those over all axes are one, on the outermost lane, whose wire every hop waits for."""
    padded, outermost = Layout(topology.sizes, spec.elements).padded, outermost_axis(topology.sizes)
    whole, sums = (flat_seconds(padded * width, topology) for width in (workload.param_bytes, workload.wire_bytes))
    passes = flat_passes(spec, plan, topology.sizes)
    gather, step, sync, back, refresh = timed
    seconds = (whole, sums, sums, whole)
    gather, step, out, refresh = (
        ((outermost, count * each),) if count else rings
        for count, each, rings in zip(passes, seconds, (gather, step, sync, refresh), strict=True)
    )
    return gather, step, out, () if passes[2] else back, refresh


def _step_of(workload: Workload, topology: Topology, plan: Plan, *, trace: bool, flat: bool) -> _Step:
    buckets = _buckets(workload, topology, plan, flat=flat)
    stages: dict[int, list[_Bucket]] = defaultdict(list)
    for bucket in buckets:
        if not bucket.root:
            stages[bucket.block].append(bucket)
    first = first_trained_block(workload.buckets())
    tiers = topology.tiers
    rank = _Rank(tuple(axis.name for axis in topology.axes), trace, 0.0, [None] * tiers, [0.0] * tiers, [0.0] * tiers)
    return _Step(
        rank=rank,
        roots=[bucket for bucket in buckets if bucket.root],
        stages=[stage for _, stage in sorted(stages.items())],
        first_trained=sum(block < first for block in stages),
        workload=workload,
        per_pass=topology.per_pass,
    )


def _micro_steps(step: _Step, count: int) -> list[float]:
    """Run all micro-steps but the last; once one ends like the one before, so will the others.

    Returns what ``rank.sums()`` lacks of those that were not run.
    """
    rank = step.rank
    before: tuple[float, ...] = ()
    for done in range(1, count):
        sums = rank.sums()
        step.micro_step(last=False)
        gone = [now - then for now, then in zip(rank.sums(), sums, strict=True)]
        now = step.steady()
        same = len(now) == len(before) and all(abs(a - b) <= 1e-9 * gone[0] for a, b in zip(now, before, strict=True))
        if same and not rank.trace:
            return [(count - 1 - done) * part for part in gone]
        before = now
    return [0.0] * len(rank.sums())


def simulate(
    workload: Workload, topology: Topology, plan: Plan | str, *, trace: bool = False, flat: bool = False
) -> Timeline:
    """Time one step of training in the steady state.

    Args:
        workload: The model and how it is trained; without times of its passes only the wires take time.
        topology: The machine, with any number of ranks.
        plan: Levels of the model; a bucket's own plan takes precedence.
        trace: Whether to keep every event, for a picture.
        flat: Whether collectives over all axes use one flat ring, which sends on the outermost lane.

    Returns:
        The step's time, and how much of it was waiting for which axis.

    Raises:
        UserError: If a letter of the plan means nothing on this machine.
    """
    plan = as_plan(plan)
    require(not (flat and workload.slow), "flat", "low-bit wires", "they are rings in two levels", "pass slow=None")
    step = _step_of(workload, topology, plan, trace=trace, flat=flat)
    rank, buckets = step.rank, [*step.roots, *(bucket for stage in step.stages for bucket in stage)]
    for bucket in buckets:
        bucket.pending = rank.submit(bucket.refresh, None, f"refresh {bucket.name}")
    skipped = _micro_steps(step, workload.accumulate)
    step.micro_step(last=True)
    # as in ``Engine.step``: returns are queued from the last bucket to the first
    for bucket in reversed(buckets):
        bucket.synced = rank.submit(bucket.back, bucket.synced, f"return {bucket.name}")
    for bucket in buckets:
        rank.wait(bucket.synced)
    update = _update_seconds(workload, topology, plan)
    rank.compute(update, "update")
    if topology.per_step:
        rank.compute(topology.per_step, "bookkeeping")
    seconds, *per_axis = (run + more for run, more in zip(rank.sums(), skipped, strict=True))
    busy, exposed = per_axis[: topology.tiers], per_axis[topology.tiers :]
    compute = workload.compute + update + engine_seconds(workload, topology)
    seconds = topology.overlap * seconds + (1 - topology.overlap) * (compute + sum(busy))
    cores = 0.0
    if topology.crowding:  # the messages of all ranks of a machine take time from its cores, too
        sent = Traffic.of_work(workload, plan, topology.sizes)
        per_axis_sent = zip(topology.axes, sent.total, sent.messages, strict=True)
        work = sum(axis.processor_seconds(size, messages) for axis, size, messages in per_axis_sent)
        cores = compute + topology.crowding * work
    return Timeline(
        seconds=max(seconds, cores),
        compute=compute,
        exposed=tuple(exposed),
        busy=tuple(busy),
        cores=cores,
        events=tuple(rank.events),
    )


def _update_seconds(workload: Workload, topology: Topology, plan: Plan) -> float:
    """The optimizer's arithmetic on the share of its state that each rank has (s)."""
    if not workload.seconds_update:
        return 0.0
    trained = [spec for spec in workload.buckets() if spec.trainable]
    tiers, held = topology.tiers, ((Layout(topology.sizes, s.elements), s.plan or plan) for s in trained)
    mine = sum(layout.size(levels.levels(tiers)[2]) for layout, levels in held)
    return workload.seconds_update * (mine / sum(spec.elements for spec in trained))


def engine_seconds(workload: Workload, topology: Topology) -> float:
    """What the engine adds to the arithmetic of a step: passes of body blocks, and what comes once (s)."""
    body = {spec.block for spec in workload.buckets() if not spec.root}
    first = first_trained_block(workload.buckets())
    passes = len(body) + sum(block >= first for block in body)
    return workload.accumulate * passes * topology.per_pass + topology.per_step


def least_seconds(workload: Workload, topology: Topology, price: Price) -> float:
    """A lower bound of ``simulate(...).seconds``, at the cost of a sum: as if nothing waited for anything else (s)."""
    sent, compute = sum(price.seconds), workload.compute + engine_seconds(workload, topology)
    hidden = max(compute, *price.seconds)
    # The two add up the same terms in other orders: rounding must not put the bound above the time.
    return (topology.overlap * hidden + (1 - topology.overlap) * (compute + sent)) * (1 - 1e-9)
