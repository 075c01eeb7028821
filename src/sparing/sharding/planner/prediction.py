"""What a plan costs before anything runs: bytes each rank holds, bytes it sends, seconds on the wires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.sharding.layout import Layout
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
from sparing.sharding.planner.cost import paper_seconds, wire_seconds
from sparing.sharding.planner.fsdp import fsdp_live_bytes, unit_specs
from sparing.sharding.planner.traffic import Kind, Sizes, Traffic, kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes that one rank holds between steps, padding included; the same on every rank."""

    params: int  # slices of the parameters, S/s(p) elements
    grads: int  # accumulated gradients, S/s(g) elements
    master: int  # S/s(os) elements; 0 where they are views of the parameters
    moments: int  # S/s(os) elements each
    residuals: int = 0  # what low-bit wires owe of gradients, g·S/n elements for g groups
    published: int = 0  # S/s(os) elements, where low-bit wires let parameters lag behind masters
    anchors: int = 0  # what groups that train alone started from, and their outer momentum: g·S/n elements each

    @property
    def total(self) -> int:
        """All of it (bytes)."""
        return self.params + self.grads + self.master + self.moments + self.residuals + self.published + self.anchors


def _held(found: Sequence[Kind], plan: Plan, sizes: Sizes) -> tuple[int, int, int]:
    """Elements that one rank holds of parameters, gradients and optimizer state."""
    held = [0, 0, 0]
    for spec, _, copies in found:
        layout = Layout(sizes, spec.elements)
        for kind, level in enumerate((spec.plan or plan).levels(len(sizes))[: 3 if spec.trainable else 1]):
            held[kind] += copies * layout.size(level)
    return held[0], held[1], held[2]


def live_bytes(
    buckets: Sequence[BucketSpec],
    sizes: Sizes,
    plan: Plan | str,
    *,
    param_bytes: int = 2,
    grad_bytes: int = 4,
    master_bytes: int = 4,
    moments: int = 2,
    views: bool = False,
    slow: LowBit | None = None,
    local: LocalSteps | None = None,
) -> Live:
    """Exactly what one rank holds (bytes); ``views``: masters share memory with parameters of the same format.

    That is impossible where ``slow`` lets parameters lag behind. A loss scale doubles residuals until a step ends.
    """
    found, plan = kinds(buckets), as_plan(plan)
    p, g, os = _held(found, plan, sizes)
    owed, lagging = _held_by_slow_wires(found, plan, sizes, slow)
    shared = (
        0
        if local is None
        else sum(
            copies * Layout(sizes, spec.elements).size(len(sizes) - 1) for spec, _, copies in found if spec.trainable
        )
    )
    if local is not None and local.wire is not None and local.wire.feedback:
        owed = shared
    return Live(
        params=p * param_bytes,
        grads=g * grad_bytes,
        master=(lagging if views else os) * master_bytes,
        moments=moments * os * master_bytes,
        residuals=owed * grad_bytes,
        published=lagging * param_bytes,
        anchors=2 * shared * master_bytes,
    )


def _held_by_slow_wires(found: Sequence[Kind], plan: Plan, sizes: Sizes, slow: LowBit | None) -> tuple[int, int]:
    """Elements of residuals, and of masters that parameters lag behind."""
    owed = lagging = 0
    for spec, _, copies in found if slow is not None else ():
        if slow is not None and spec.trainable:
            layout, (p, _, os) = Layout(sizes, spec.elements), (spec.plan or plan).levels(len(sizes))
            owed += copies * layout.size(len(sizes) - 1) * slow.feedback
            lagging += copies * layout.size(os) * slow.lags(p, os, len(sizes))
    return owed, lagging


def transient_bytes(workload: Workload, sizes: Sizes, plan: Plan | str) -> int:
    """The most that is whole at one time besides the slices (bytes).

    That is the roots and the 1 + prefetch largest blocks of cut parameters; and of full gradients where they are cut,
    those of roots, which leave when the backward pass ends, and the ``grad_buffers`` largest others.
    """
    root, blocks, kept, grads, plan = 0, defaultdict[int, int](int), 0, [0], as_plan(plan)
    known: dict[tuple[int, Plan | None], tuple[int, bool, bool]] = {}
    for spec in workload.buckets():
        key = (spec.elements, spec.plan)
        if key not in known:
            p, g, _ = (spec.plan or plan).levels(len(sizes))
            layout = Layout(sizes, spec.elements)
            known[key] = layout.padded, layout.size(p) < layout.padded, layout.size(g) < layout.padded
        padded, params_cut, grads_cut = known[key]
        if params_cut and spec.root:
            root += padded
        elif params_cut:
            blocks[spec.block] += padded
        if grads_cut and spec.trainable and spec.root:
            kept += padded
        elif grads_cut and spec.trainable:
            grads.append(padded)
    whole = root + sum(sorted(blocks.values())[-1 - workload.prefetch :])
    return whole * workload.param_bytes + (kept + sum(sorted(grads)[-workload.grad_buffers :])) * workload.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one plan costs one rank."""

    plan: Plan
    params: int  # slices (bytes), 2Ψ/s(p)
    grads: int  # accumulated (bytes), 2Ψ'/s(g)
    optimizer: int  # masters and moments (bytes), 12Ψ'/s(os)
    transient: int  # whole at one time: gathered parameters and full gradients (bytes)
    activations: int  # of one micro-step (bytes)
    traffic: Traffic
    seconds: tuple[float, ...]  # each axis is busy in one step, with latency and shared wires
    paper_seconds: float  # communication of one step by the paper's formulas, reconstructed, t_comm
    # Parameters and accumulated gradients as the letters cut them, alike for both engines (bytes).
    slices: tuple[int, int]
    slow: int = 0  # residuals of low-bit wires, and what lagging parameters need besides (bytes)
    kept: int = 0  # shards that ``fully_shard`` keeps beside whole parameters (bytes)

    @property
    def static(self) -> int:
        """Bytes held throughout: M_static."""
        return self.params + self.kept + self.grads + self.optimizer + self.slow

    @property
    def memory(self) -> int:
        """Bytes at the peak of a step."""
        return self.static + self.transient + self.activations


def predict(workload: Workload, topology: Topology, plan: Plan | str) -> Price:
    """Return what a plan costs.

    Args:
        workload: The model and how it is trained, and by which engine.
        topology: The machine.
        plan: Levels of the model.

    Returns:
        Memory, traffic and times of the wires; ``simulate`` adds what overlaps with computation.

    Raises:
        UserError: If a letter of the plan means nothing on this machine.

    Example:
        >>> machine = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
        >>> price = predict(Workload(params=7e9, accumulate=10), machine, "IIG")
        >>> round(price.static / 1e9, 3), round(price.paper_seconds, 3)
        (6.125, 1.733)
    """
    plan, sizes = as_plan(plan), topology.sizes
    found = kinds(workload.buckets())
    p, g, os = _held(found, plan, sizes)
    owed, lagging = _held_by_slow_wires(found, plan, sizes, workload.slow)
    # Residuals have 32 bits, as accumulators must; parameters of 32 bits are no longer the masters.
    lag_bytes = workload.param_bytes * (2 if workload.param_bytes >= 4 else 1)
    traffic = Traffic.of_work(workload, plan, sizes)
    slices = (p * workload.param_bytes, g * workload.grad_bytes)
    params, grads, optimizer, kept = (*slices, os * workload.state_bytes, 0)
    if workload.engine == "fsdp2":
        params, grads, optimizer, kept = _on_fsdp2(workload, sizes, plan)
    return Price(
        plan=plan,
        params=params,
        grads=grads,
        optimizer=optimizer,
        transient=transient_bytes(workload, sizes, plan),
        activations=workload.activations,
        traffic=traffic,
        seconds=wire_seconds(traffic, topology),
        paper_seconds=paper_seconds(workload, topology, plan).total,
        slices=slices,
        slow=owed * max(workload.grad_bytes, 4) + lagging * lag_bytes,
        kept=kept,
    )


def _on_fsdp2(workload: Workload, sizes: Sizes, plan: Plan) -> tuple[int, int, int, int]:
    """Parameters, gradients, optimizer state and shards beside whole parameters on ``fully_shard`` (bytes)."""
    wide = max(workload.param_bytes, 4)
    live = fsdp_live_bytes(
        unit_specs(workload.buckets()), sizes, plan, param_bytes=workload.param_bytes, grad_bytes=workload.grad_bytes,
        master_bytes=wide, moments=1,
    )  # fmt: skip
    # of shorter parameters ``state_bytes`` has the masters; else the optimizer has values only of rows of its own
    own = live.master if workload.param_bytes == wide else 0
    return live.params, live.grads, live.moments // wide * workload.state_bytes + own, live.kept
