"""What a plan costs before anything runs: bytes each rank holds, bytes it sends, seconds on the wires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.sharding.config import BucketSpec, Topology, Workload
from sparing.sharding.cost import paper_seconds, wire_seconds
from sparing.sharding.layout import Layout
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.traffic import Sizes, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes that one rank holds between and over steps, padding included; the same on every rank."""

    params: int
    """Slices of the parameters (bytes), S/s(p) elements."""

    grads: int
    """Accumulated gradients (bytes), S/s(g) elements."""

    master: int
    """Masters (bytes), S/s(os) elements; 0 where they are views of the parameters' slices."""

    moments: int
    """Moments of the optimizer (bytes), S/s(os) elements each."""

    @property
    def total(self) -> int:
        """All of it (bytes)."""
        return self.params + self.grads + self.master + self.moments


def _held(spec: BucketSpec, plan: Plan, sizes: Sizes) -> tuple[int, int, int]:
    """Return the elements one rank holds of a bucket's parameters, gradients and optimizer state."""
    layout = Layout(sizes, spec.elements)
    p, g, os = (layout.size(level) for level in (spec.plan or plan).levels(len(sizes)))
    return (p, g, os) if spec.trainable else (p, 0, 0)


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
) -> Live:
    """Return exactly what one rank holds.

    Args:
        buckets: Buckets of the model.
        sizes: Axis sizes, innermost first.
        plan: Levels of the model; a bucket's own plan goes first.
        param_bytes: Bytes of a parameter.
        grad_bytes: Bytes of an accumulated gradient.
        master_bytes: Bytes of a master and of each moment.
        moments: Moments the optimizer keeps: 2 for Adam, 0 for plain SGD.
        views: Whether masters have the parameters' number format, and so are views of them.

    Returns:
        Bytes by kind.

    Raises:
        UserError: If a letter of the plan means nothing on these axes.
    """
    held = [_held(spec, as_plan(plan), sizes) for spec in buckets]
    p, g, os = (sum(kind) for kind in zip(*held, strict=True)) if held else (0, 0, 0)
    return Live(
        params=p * param_bytes,
        grads=g * grad_bytes,
        master=0 if views else os * master_bytes,
        moments=moments * os * master_bytes,
    )


def transient_bytes(workload: Workload, sizes: Sizes, plan: Plan | str) -> int:
    """Return the most that is whole at one time besides the slices.

    Args:
        workload: Buckets, prefetch and bytes per element.
        sizes: Axis sizes, innermost first.
        plan: Levels of the model; a bucket's own plan goes first.

    Returns:
        Bytes of the roots and the 1 + prefetch largest blocks of cut parameters, and of the full gradients of roots,
        which leave when the backward pass ends, and of the largest others, where gradients are cut.

    Raises:
        UserError: If a letter of the plan means nothing on these axes.
    """
    root, blocks, kept, grads = 0, defaultdict[int, int](int), 0, [0]
    for spec in workload.buckets():
        p, g, _ = (spec.plan or as_plan(plan)).levels(len(sizes))
        layout = Layout(sizes, spec.elements)
        padded = layout.padded
        if layout.size(p) < padded and spec.root:
            root += padded
        elif layout.size(p) < padded:
            blocks[spec.block] += padded
        if layout.size(g) < padded and spec.trainable and spec.root:
            kept += padded
        elif layout.size(g) < padded and spec.trainable:
            grads.append(padded)
    whole = root + sum(sorted(blocks.values())[-1 - workload.prefetch :])
    return whole * workload.param_bytes + (kept + sum(sorted(grads)[-workload.grad_buffers :])) * workload.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one plan costs one rank."""

    plan: Plan
    """Levels of the model."""

    params: int
    """Slices of the parameters (bytes), 2Ψ/s(p)."""

    grads: int
    """Accumulated gradients (bytes), 2Ψ'/s(g)."""

    optimizer: int
    """Masters and moments (bytes), 12Ψ'/s(os)."""

    transient: int
    """Most that is whole at one time: gathered parameters and full gradients (bytes)."""

    activations: int
    """Activations of one micro-step (bytes), as far as given."""

    traffic: Traffic
    """Bytes sent in one step, by axis and cause."""

    seconds: tuple[float, ...]
    """Time each axis is busy in one step (s), with latency and shared wires."""

    paper_seconds: float
    """The paper's communication time of one step (s), t_comm."""

    @property
    def static(self) -> int:
        """Bytes held throughout: M_static."""
        return self.params + self.grads + self.optimizer

    @property
    def memory(self) -> int:
        """Bytes at the peak of a step."""
        return self.static + self.transient + self.activations


def predict(workload: Workload, topology: Topology, plan: Plan | str) -> Price:
    """Return what a plan costs.

    Args:
        workload: The model and how it is trained.
        topology: The machine.
        plan: Levels of the model.

    Returns:
        Memory, traffic and times of the wires; ``simulate`` adds what hides behind computation.

    Raises:
        UserError: If a letter of the plan means nothing on this machine.

    Example:
        >>> machine = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
        >>> price = predict(Workload(params=7e9, accumulate=10), machine, "IIG")
        >>> round(price.static / 1e9, 3), round(price.paper_seconds, 3)
        (6.125, 1.733)
    """
    plan, sizes, buckets = as_plan(plan), topology.sizes, workload.buckets()
    p, g, os = (sum(kind) for kind in zip(*(_held(spec, plan, sizes) for spec in buckets), strict=True))
    traffic = Traffic.of_step(
        plan,
        sizes,
        buckets,
        accumulate=workload.accumulate,
        gather_bytes=workload.param_bytes,
        reduce_bytes=workload.wire_bytes,
    )
    return Price(
        plan=plan,
        params=p * workload.param_bytes,
        grads=g * workload.grad_bytes,
        optimizer=os * workload.state_bytes,
        transient=transient_bytes(workload, sizes, plan),
        activations=workload.activations,
        traffic=traffic,
        seconds=wire_seconds(traffic, topology),
        paper_seconds=paper_seconds(workload, topology, plan).total,
    )
