"""Seconds on the wire: the paper's guideline, and a model with latency and shared wires (Zhang et al., NeurIPS 2024).

``paper_seconds`` is the guideline, reconstructed from the paper's text since its tables are images: bandwidth only, a
collective over all GPUs runs at the speed between groups. ``wire_seconds`` times what the rings really send, axis by
axis. ``collective_seconds`` compares the three ways to run one collective over two axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from sparing.errors import require
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.flat import flat_seconds
from sparing.sharding.planner.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSeconds:
    """The guideline's communication time of one step, reconstructed, by cause."""

    params: float  # gathering parameters, per micro-step, t_param
    grads: float  # reducing gradients, per micro-step, t_gradient
    sync_grads: float  # completing gradients, once, t_sync_g
    sync_params: float  # gathering new parameters, once, t_sync_p
    accumulate: int  # micro-steps, s

    @property
    def total(self) -> float:
        """Communication of one step (s): t_comm = (t_param + t_gradient)·s + t_sync_g + t_sync_p."""
        return (self.params + self.grads) * self.accumulate + self.sync_grads + self.sync_params


def _flat(topology: Topology, frm: int, to: int, size: float) -> float:
    """Time of one ring over axes ``frm`` … ``to``-1 together, at the speed of the outermost (s)."""
    axes = [axis for axis in topology.axes[frm:to] if axis.size > 1]
    ranks = prod(axis.size for axis in axes)
    return (ranks - 1) / ranks * size / axes[-1].rate if axes else 0.0


def paper_seconds(workload: Workload, topology: Topology, plan: Plan | str) -> PaperSeconds:
    """The guideline's communication time: bandwidth only, global collectives as flat rings.

    Its tables 4 to 7 are images and were reconstructed from the text. Buckets, compute times, latencies and shared
    wires are ignored, as in the paper.
    """
    p, g, os = as_plan(plan).levels(topology.tiers)
    held = [1 / prod(topology.sizes[:level]) for level in range(topology.tiers + 1)]
    whole, trained = workload.params * workload.param_bytes, workload.trainable * workload.param_bytes
    grads = workload.trainable * workload.wire_bytes
    completed = _flat(topology, g, os, grads * held[g]) + 2 * _flat(topology, os, topology.tiers, grads * held[os])
    return PaperSeconds(
        params=2 * _flat(topology, 0, p, whole),
        grads=_flat(topology, 0, g, grads),
        sync_grads=completed,
        sync_params=_flat(topology, p, os, trained * held[p]),
        accumulate=workload.accumulate,
    )


def guideline_seconds(workload: Workload, topology: Topology, plan: Plan | str) -> float:
    """The guideline's time of one step, reconstructed, all communication hidden: T = max(t_comm, t_comp) (s)."""
    return max(paper_seconds(workload, topology, plan).total, workload.compute)


def wire_seconds(traffic: Traffic, topology: Topology) -> tuple[float, ...]:
    """How long each axis is busy in one step, innermost first: messages·(α + overhead) + bytes·κ/rate (s)."""
    sent = zip(topology.axes, traffic.total, traffic.messages, strict=True)
    return tuple(axis.seconds(size, messages) for axis, size, messages in sent)


How = Literal["flat", "two-level", "overlapped"]


def collective_seconds(size: float, topology: Topology, how: How = "two-level") -> float:
    """Time of an all-gather or reduce-scatter of ``size`` bytes over all ranks of two axes (s): PaRO-CC or a flat ring.

    In a flat ring in rank order one rank of a group sends to the next group, so it has the wire for itself, but every
    hop waits for that wire. Two-level sends each byte once over each kind of wire, the ranks of a group side by side.
    Overlapped spreads every block inside the group while the next one travels between groups.
    """
    why = "the three ways are told apart on two axes"
    require(topology.tiers == 2, "tiers", topology.tiers, why, "pass groups and per_group")
    intra, inter = topology.axes
    m, g, block = intra.size, inter.size, size / topology.world
    if how == "flat":
        return flat_seconds(size, topology)
    hop, spread = inter.seconds(block, 1), (m - 1) * intra.seconds(block, 1)
    if how == "overlapped":
        return (g - 1) * max(hop, spread) + spread
    return (g - 1) * hop + (m - 1) * intra.seconds(block * g, 1)
