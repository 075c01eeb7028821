"""What messages take of the cores, probed for cells that were measured before it was part of the probe.

    python -m benchmarks.network.labour benchmarks/results/network_plans.jsonl

Every network of the record is set up once more and probed by the code of today. Of that probe only the processor time
of a message and the ranks on a core are used; links and arithmetic stay as they were probed beside the plans. What the
simulator said without it is kept as ``predicted_wires``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.network.arms import PLANS
from benchmarks.network.cells import Cell
from benchmarks.network.predictions import by_cell, cell_of, workload
from benchmarks.network.sweep import Lab, lab
from sparing.report import Progress, Record
from sparing.sharding.config import Topology
from sparing.sharding.simulate import simulate


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
    return Topology(axes=axes, overlap=links.overlap, crowding=now.crowding)


def amend(record: Record, cell: Cell, now: Topology) -> None:
    """Predict a cell once more."""
    (probe,) = [row for row in record.rows if row["table"] == "probes" and cell_of(row) == cell]
    machine = with_labour(Topology.from_json(str(probe["topology"])), now)
    probe |= {"topology": machine.to_json(), "labour": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    arms = {row["arm"]: row for row in record.rows if row["table"] == "arms" and cell_of(row) == cell}
    work = workload(cell, arms.get("alone"))
    for plan in (plan for plan in PLANS if plan in arms):
        arms[plan].setdefault("predicted_wires", arms[plan]["predicted"])
        arms[plan]["predicted"] = simulate(work, machine, plan).seconds


def old_cells(record: Record) -> list[Cell]:
    """Cells whose probe knows nothing of cores."""
    probes: Iterable[tuple[Cell, Any]] = by_cell(record.table("probes")).items()
    return [cell for cell, rows in probes if not Topology.from_json(str(rows["probe"]["topology"])).crowding]


def main() -> None:
    """Probe, predict and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long a probe takes")
    options = parser.parse_args()
    record = Record.read(options.record)
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
