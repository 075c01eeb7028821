"""What the formulas say of a plan under drawn blocks: bytes, seconds, and the plan that ``choose`` would take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.network.arms import PLANS
from benchmarks.network.cells import Cell
from sparing.sharding import choose
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
from sparing.sharding.planner.simulation import simulate
from sparing.sharding.planner.traffic import Traffic

Drawn = Sequence[int]
Parts = Mapping[str, float]


def specs(cell: Cell, drawn: Drawn) -> list[BucketSpec]:
    """Buckets of the model as the engine makes them; all blocks train if none is drawn."""
    size = 2 * cell.width * (cell.width + 1)
    return [BucketSpec(elements=size, trainable=not drawn or at in drawn, block=at) for at in range(cell.blocks)]


def workload(cell: Cell, drawn: Drawn, parts: Parts | None) -> Workload:
    """The work of a step in float32; its arithmetic from the arm that sends nothing, in the same round."""
    times = {f"seconds_{name}": parts[name] for name in ("forward", "backward", "update")} if parts else {}
    return Workload.of(
        specs(cell, drawn), accumulate=cell.accumulate, param_bytes=4, grad_bytes=4, wire_bytes=4, state_bytes=8,
        **times,
    )  # fmt: skip


def bytes_of(cell: Cell, plan: str, drawn: Drawn) -> dict[str, int]:
    """What one rank sends in a step, by axis."""
    sizes = (cell.per_group, cell.groups)
    found = Traffic.of_step(
        plan, sizes, specs(cell, drawn), accumulate=cell.accumulate, gather_bytes=4, reduce_bytes=4
    ).total
    return dict(zip(("intra", "inter"), found, strict=True))


def seconds_of(cell: Cell, plan: str, rounds: Sequence[tuple[Drawn, Parts]], place: Topology) -> float:
    """The simulator's step, the median over the rounds and their draws."""
    return statistics.median(simulate(workload(cell, drawn, parts), place, plan).seconds for drawn, parts in rounds)


def picks(cell: Cell, first: tuple[Drawn, Parts], place: Topology) -> dict[str, str]:
    """The plan of ``choose`` for the blocks of the first interval, as the jobs ask it: told the arithmetic, and not."""
    drawn, parts = first
    told, blind = (choose(workload(cell, drawn, known), place, plans=PLANS) for known in (parts, None))
    return {"chosen": told.plan.name, "chosen_wires": blind.plan.name}
