"""Local steps priced: groups that meet once in H steps, each number of steps with its best plan.

They are another algorithm than the steps of all ranks together: what they cost in loss no formula here knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparing.memory.sizes import parse_bytes
from sparing.sharding.levels import Plan, as_plan, effective
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.prediction import live_bytes, predict
from sparing.sharding.planner.simulation import simulate
from sparing.sharding.planner.traffic import Traffic

MASTER = 4  # bytes of an element of masters, anchors and outer momentum, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrice:
    """What a plan costs one rank where groups train alone."""

    plan: Plan
    local: LocalSteps
    seconds: float  # of one step, with its share of an outer step
    outer_seconds: float  # of an outer step, behind which nothing hides
    memory: int  # most that a rank holds (bytes)
    leaving: float  # from each group, in one step of which an outer one has its share (bytes)


def local_price(workload: Workload, topology: Topology, plan: Plan | str, local: LocalSteps) -> LocalPrice:
    """What a plan without its finest letter costs: a step inside one group, and 1/H of an outer step."""
    plan, (*inner, outer) = as_plan(plan), topology.axes
    alone = replace(workload, slow=None, engine="sparing")
    master = max(workload.param_bytes, MASTER)
    widths: dict[str, Any] = {"gather_bytes": workload.param_bytes, "reduce_bytes": workload.wire_bytes}
    widths |= {"accumulate": workload.accumulate, "master_bytes": master}
    traffic = Traffic.of_step(plan, topology.sizes, alone.buckets(), local=local, **widths)
    group = replace(topology, axes=(*inner, replace(outer, size=1)))
    sent = zip(topology.axes, traffic.outer, traffic.outer_messages, strict=True)
    meeting = sum(axis.seconds(size, messages) for axis, size, messages in sent)
    held = live_bytes(alone.buckets(), topology.sizes, plan, grad_bytes=master, master_bytes=master, local=local)
    between = traffic.outer[-1] * (topology.world // outer.size)
    return LocalPrice(
        plan=plan,
        local=local,
        seconds=simulate(alone, group, plan).seconds + meeting / local.every,
        outer_seconds=meeting,
        memory=predict(alone, topology, plan).memory + held.anchors + held.residuals,
        leaving=between / local.every,
    )


def local_choices(
    workload: Workload, topology: Topology, locals_: Sequence[LocalSteps], memory: str | float | None = None
) -> tuple[LocalPrice | None, ...]:
    """The fastest plan that fits for each way to take local steps; none where nothing does."""
    limit = None if memory is None else parse_bytes(memory if isinstance(memory, str) else int(memory))
    plans = [plan for plan in effective(topology.tiers) if max(plan.levels(topology.tiers)) < topology.tiers]
    found: list[LocalPrice | None] = []
    for local in locals_:
        prices = [local_price(workload, topology, plan, local) for plan in plans]
        fit = [price for price in prices if limit is None or price.memory <= limit]
        # of equally fast ones that which holds least
        found.append(min(fit, key=lambda price: (price.seconds, price.memory), default=None))
    return tuple(found)
