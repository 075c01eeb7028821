"""Predicted against measured: the simulator's step time of every plan, and how well it ranks the plans of a cell.

    python -m benchmarks.network.predictions benchmarks/results/network_plans.jsonl

What the simulator is told is what the same run measured before and beside the plans: the links by ``measure(mesh)``,
and the arithmetic by the arm that sends nothing. ``--wires`` leaves out what messages take of the cores; ``--nominal``
tells it the rates that the links are held to instead: cells measured with ``--probe 0`` have nothing else. Rows keep
these predictions as the code that was measured made them; ``--again`` asks the code of today.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.network.arms import PLANS
from benchmarks.network.cells import Cell
from sparing.report import Record, print_table
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
from sparing.sharding.planner.simulation import simulate
from sparing.sharding.planner.traffic import Traffic

Row = Mapping[str, Any]
PAYLOAD = 1448 / 1514
"""Share of a full Ethernet frame that is payload of TCP with timestamps."""


def specs(cell: Cell) -> list[BucketSpec]:
    """Buckets of the problem's model, as the engine makes them."""
    whole = 2 * cell.width * (cell.width + 1)
    rows = round(2 * cell.width * cell.trainable)
    trained = whole if cell.trainable >= 1 else rows * cell.width
    found = []
    for block in range(cell.blocks):
        found.append(BucketSpec(elements=trained, block=block))
        if trained < whole:
            found.append(BucketSpec(elements=whole - trained, trainable=False, block=block))
    return found


def workload(cell: Cell, alone: Row | None) -> Workload:
    """The cell's work in float32; arithmetic from the arm that sends nothing, where there is one."""
    times = {}
    if alone is not None:
        times = {
            "seconds_forward": alone["forward"], "seconds_backward": alone["backward"],
            "seconds_update": alone["update"],
        }  # fmt: skip
    return Workload.of(
        specs(cell), accumulate=cell.accumulate, param_bytes=4, grad_bytes=4, wire_bytes=4, state_bytes=8, **times
    )


def nominal(cell: Cell) -> Topology:
    """The links as they are held: rates less headers, each shared by all ranks of its group, no latency."""
    return Topology(
        groups=cell.groups, per_group=cell.per_group, inter=PAYLOAD * cell.inter / 8, intra=PAYLOAD * cell.intra / 8,
        sharing=cell.per_group, sharing_intra=cell.per_group,
    )  # fmt: skip


def cell_of(row: Row) -> Cell:
    """The cell of a row."""
    return Cell(**{name: row[name] for name in Cell().plain()})


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, Row]]:
    """Rows by cell and arm."""
    found: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(cell_of(row), {})[str(row.get("arm", "probe"))] = row
    return found


def priced(cell: Cell, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of a cell with what the simulator of this very code says of every plan, so that later code changes nothing.

    Args:
        cell: The cell.
        rows: What ``sweep`` has just measured of it, the probe among them if there was one.

    Returns:
        The rows; those of plans with ``predicted`` (links as probed) and ``predicted_nominal`` (as they are held).
    """
    found = [dict(row) for row in rows]
    arms = {row["arm"]: row for row in found if row["table"] == "arms"}
    probe = next((str(row["topology"]) for row in found if row["table"] == "probes"), None)
    work = workload(cell, arms.get("alone"))
    places = {"predicted_nominal": nominal(cell)}
    if probe:
        whole = Topology.from_json(probe)
        places |= {"predicted": whole, "predicted_wires": wires_alone(whole), "predicted_cores": without_engine(whole)}
    for plan in (plan for plan in PLANS if plan in arms):
        arms[plan] |= {name: simulate(work, place, plan).seconds for name, place in places.items()}
    return found


def without_engine(place: Topology) -> Topology:
    """A machine on which nothing is known of what collectives and the engine add."""
    return replace(place, axes=[replace(axis, overhead=0.0) for axis in place.axes], per_pass=0.0, per_step=0.0)


def wires_alone(place: Topology) -> Topology:
    """A machine of which links alone are known."""
    return Topology(axes=without_engine(place).axes, overlap=place.overlap)


def predicted(
    record: Record, *, held: bool = False, wires: bool = False, cores: bool = False, again: bool = False
) -> Iterator[dict[str, Any]]:
    """One row per measured plan of every cell.

    Args:
        record: Of ``sweep``.
        held: Believe the rates that links are held to, not the probe.
        wires: Leave out what messages take of the cores, and what collectives and the engine add.
        cores: Leave out the latter only.
        again: Ask the simulator of today, not the one of the code that was measured.

    Yields:
        Cell, plan, measured and predicted seconds, and whether the counted bytes are the formula's; plans of cells that
        were not probed only if ``held``.
    """
    probes = by_cell(record.table("probes"))
    kind = "_nominal" if held else "_wires" if wires else "_cores" if cores else ""
    column = f"predicted{kind}"
    for cell, arms in by_cell(record.table("arms")).items():
        probe = probes.get(cell, {}).get("probe")
        if not held and probe is None and not any(column in row for row in arms.values()):
            continue
        place = nominal(cell) if held or probe is None else Topology.from_json(str(probe["topology"]))
        place = wires_alone(place) if wires else without_engine(place) if cores else place
        work = workload(cell, arms.get("alone"))
        for plan in (plan for plan in PLANS if plan in arms):
            row = arms[plan]
            sent = Traffic.of_step(
                plan, place.sizes, work.buckets(), accumulate=cell.accumulate, gather_bytes=4, reduce_bytes=4
            ).total  # fmt: skip
            old = None if again else row.get(column)
            yield {
                **cell.plain(), "plan": plan, "measured": row["seconds"], "low": row["seconds_low"],
                "high": row["seconds_high"], "rounds": [float(one) for one in row["rounds"].split()],
                "predicted": simulate(work, place, plan).seconds if old is None else old,
                "bytes_as_formula": sent == (row["payload_intra"], row["payload_inter"]),
            }  # fmt: skip


def kendall(first: Sequence[float], second: Sequence[float], tie: float = 0.0) -> float:
    """Kendall's τ-b of two lists; values within a share ``tie`` of each other count as equal."""
    agree, ties = 0, [0, 0]
    pairs = list(combinations(range(len(first)), 2))
    for i, j in pairs:
        one, two = sign(first[i], first[j], tie), sign(second[i], second[j], tie)
        agree += one * two
        ties = [ties[0] + (one == 0), ties[1] + (two == 0)]
    scale = ((len(pairs) - ties[0]) * (len(pairs) - ties[1])) ** 0.5
    return agree / scale if scale else 1.0


def sign(a: float, b: float, tie: float) -> int:
    """-1, 0 or 1 as a is less than, about equal to, or more than b."""
    return 0 if abs(a - b) <= tie * max(a, b) else (1 if a > b else -1)


def repeated(plans: Sequence[Row], tie: float) -> float:
    """How well a measurement repeats its ranking of the plans: mean τ of a round and the medians of the others."""
    rounds = [row["rounds"] for row in plans]
    found = []
    for at in range(len(rounds[0])):
        others = [statistics.median(times[:at] + times[at + 1 :]) for times in rounds]
        found.append(kendall([times[at] for times in rounds], others, tie))
    return statistics.mean(found)


def beside_measuring(plans: Sequence[Row], chosen: str) -> float:
    """How much longer the predicted best takes in a round than the plan that all other rounds would have chosen.

    The least of many noisy medians is lower than any plan's true time; a round that chose neither plan favours none.
    """
    found = []
    for at in range(len(plans[0]["rounds"])):
        others = {row["plan"]: statistics.median(row["rounds"][:at] + row["rounds"][at + 1 :]) for row in plans}
        now = {row["plan"]: row["rounds"][at] for row in plans}
        found.append(now[chosen] / now[min(others, key=others.__getitem__)] - 1)
    return statistics.mean(found)


def judged(rows: Iterable[Row], tie: float, *, always: str | None = None) -> list[dict[str, Any]]:
    """How well each cell's plans are ranked: τ, whether the first is the first, and what the choice costs.

    ``always`` takes this plan instead of the one predicted first. ``even`` says that the rounds of the chosen plan and
    of the best overlap: the measurement does not tell them apart.
    """
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_of(row), []).append(row)
    found = []
    for cell, plans in cells.items():
        best = min(plans, key=lambda row: row["measured"])
        chosen = min(plans, key=lambda row: (row["plan"] != always, row["predicted"]))
        found.append({
            "groups": cell.groups, "per_group": cell.per_group, "ratio": cell.ratio, "accumulate": cell.accumulate,
            "trainable": cell.trainable, "plans": len(plans),
            "tau": kendall([row["measured"] for row in plans], [row["predicted"] for row in plans], tie),
            "chosen": chosen["plan"], "best": best["plan"], "regret": chosen["measured"] / best["measured"] - 1,
            "hit": chosen["plan"] == best["plan"], "repeat": repeated(plans, tie),
            "fresh": beside_measuring(plans, chosen["plan"]),
            "even": chosen["low"] <= best["high"],
            "close": chosen["measured"] <= best["measured"] * (1 + tie),
            "off": statistics.median(row["predicted"] / row["measured"] for row in plans),
        })  # fmt: skip
    return found


def main() -> None:
    """Print every cell, and the three numbers over all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--nominal", action="store_true", help="rates that links are held to, instead of the probe")
    parser.add_argument("--wires", action="store_true", help="without what messages take of the cores")
    parser.add_argument("--again", action="store_true", help="ask the simulator of today")
    parser.add_argument("--tie", type=float, default=0.0, help="times within this share of each other are equal")
    parser.add_argument("--plans", action="store_true", help="print every plan too")
    options = parser.parse_args()
    rows = list(predicted(Record.read(options.record), held=options.nominal, wires=options.wires, again=options.again))
    if options.plans:
        print_table(rows, units={"measured": "s", "predicted": "s"})
    cells = judged(rows, options.tie)
    print_table(cells)
    if cells:
        hits = statistics.mean(row["chosen"] == row["best"] for row in cells)
        tau, regret, fresh = (statistics.mean(row[name] for row in cells) for name in ("tau", "regret", "fresh"))
        worst = max(row["regret"] for row in cells)
        exact = all(row["bytes_as_formula"] for row in rows)
        said = (
            f"τ {tau:.3f}, first hit {hits:.0%}, regret {regret:.1%} (most {worst:.1%}), in a fresh round {fresh:.1%}"
        )
        print(f"{said}, bytes exact: {exact}")


if __name__ == "__main__":
    main()
