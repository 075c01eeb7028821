"""What messages take of the cores, probed for cells that were measured before it was part of the probe.

    python -m benchmarks.network.labour benchmarks/results/network_plans.jsonl
    python -m benchmarks.network.labour benchmarks/results/network_plans.jsonl --fit  # only says what the engine spends

Every network of the record is set up once more and probed by the code of today. Of that probe only the processor time
of a message and the ranks on a core are used; links and arithmetic stay as they were probed beside the plans. What the
simulator said without it is kept as ``predicted_wires``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.network.arms import PLANS
from benchmarks.network.cells import Cell
from benchmarks.network.predictions import by_cell, cell_of, nominal, workload
from benchmarks.network.sweep import Lab, lab
from sparing.report import Progress, Record, print_table
from sparing.sharding.planner.config import Topology
from sparing.sharding.planner.simulation import simulate
from sparing.sharding.planner.traffic import Traffic


def network(cell: Cell) -> tuple[float, ...]:
    """What cells of one network have in common."""
    return cell.groups, cell.per_group, cell.inter, cell.intra


def probed(place: Lab, cell: Cell, seconds: float) -> Topology:
    """The machine as the code of today finds it on the links of a cell."""
    job = {"kind": "probe", "groups": cell.groups, "per_group": cell.per_group, "seconds": seconds}
    (found,) = [answer for answer in place.ready(cell).do(**job) if answer["kind"] == "probe"]
    return Topology.from_json(found["topology"])


def with_labour(links: Topology, now: Topology) -> Topology:
    """Links as they were, work as it is."""
    axes = [
        replace(old, work=new.work, work_per_byte=new.work_per_byte)
        for old, new in zip(links.axes, now.axes, strict=True)
    ]
    return replace(links, axes=axes, crowding=now.crowding)


def amend(record: Record, cell: Cell, now: Topology) -> None:
    """Predict a cell once more."""
    (probe,) = [row for row in record.rows if row["table"] == "probes" and cell_of(row) == cell]
    machine = with_labour(_topology(probe), now)
    probe |= {"topology": machine.to_json(), "labour": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    arms = {row["arm"]: row for row in record.rows if row["table"] == "arms" and cell_of(row) == cell}
    work = workload(cell, arms.get("alone"))
    for plan in (plan for plan in PLANS if plan in arms):
        arms[plan].setdefault("predicted_wires", arms[plan]["predicted"])
        arms[plan]["predicted"] = simulate(work, machine, plan).seconds


def old_cells(record: Record) -> list[Cell]:
    """Cells whose probe knows nothing of cores."""
    probes: Iterable[tuple[Cell, Any]] = by_cell(record.table("probes")).items()
    return [cell for cell, rows in probes if not _topology(rows["probe"]).crowding]


def spent(record: Record) -> list[dict[str, Any]]:
    """Processor time of a message in the engine, shape by shape, beside the probe's.

    Least squares, over all plans and cells of a shape, of the processor time of a step (less that of the arm that sends
    nothing, all ranks together) on its messages and on its bytes.
    """
    cells = {cell: rows for cell, rows in by_cell(record.table("arms")).items() if "alone" in rows}
    probes = by_cell(record.table("probes"))
    found = []
    for shape in dict.fromkeys((cell.groups, cell.per_group) for cell in cells):
        own = {cell: rows for cell, rows in cells.items() if (cell.groups, cell.per_group) == shape}
        counts, seconds = zip(*(point for cell, rows in own.items() for point in _points(cell, rows)), strict=True)
        fit, rest, *_ = np.linalg.lstsq(np.array(counts), np.array(seconds))
        axes = [axis for cell in own if cell in probes for axis in _topology(probes[cell]["probe"]).axes]
        found.append({
            "shape": "×".join(map(str, shape)), "message": fit[0], "byte": fit[1], "n": len(seconds),
            "explained": 1 - float(rest[0]) / float(np.var(seconds) * len(seconds)),
            "probe_message": median(axis.work for axis in axes),
            "probe_byte": median(axis.work_per_byte for axis in axes),
        })  # fmt: skip
    return found


def _points(cell: Cell, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[int, int], float]]:
    """Messages and bytes of all ranks in one step of every plan, and the processor time they took."""
    work = workload(cell, rows["alone"])
    for plan in (plan for plan in PLANS if plan in rows):
        traffic = Traffic.of_step(
            plan, nominal(cell).sizes, work.buckets(), accumulate=cell.accumulate, gather_bytes=4, reduce_bytes=4
        )  # fmt: skip
        counts = cell.world * sum(traffic.messages), cell.world * sum(traffic.total)
        yield counts, rows[plan]["cpu"] - rows["alone"]["cpu"]


def _topology(probe: Mapping[str, Any]) -> Topology:
    return Topology.from_json(str(probe["topology"]))


def main() -> None:
    """Probe, predict and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long a probe takes")
    parser.add_argument("--fit", action="store_true", help="say what messages take in the engine; change nothing")
    options = parser.parse_args()
    record = Record.read(options.record)
    if options.fit:
        print_table(spent(record), units={"message": "s", "byte": "s", "probe_message": "s", "probe_byte": "s"})
        return
    cells = sorted(old_cells(record), key=network)
    known: dict[tuple[float, ...], Topology] = {}
    with (
        lab(links="shaped", python=sys.executable, patience=300.0, log=None) as place,
        Progress("labour", total=len(cells), unit="cell") as bar,
    ):
        for cell in cells:
            if network(cell) not in known:
                known[network(cell)] = probed(place, cell, options.seconds)
            amend(record, cell, known[network(cell)])
            bar.advance()
    record.write(options.record)


if __name__ == "__main__":
    main()
