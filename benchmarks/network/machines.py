"""What the planner says of machines that are not here: three kinds of links, unequal groups, few bits between groups.

python -m benchmarks.network.machines
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.memory_tables import table
from benchmarks.network.cells import REFERENCE
from benchmarks.network.predictions import by_cell, nominal, workload
from sparing.report import Record
from sparing.sharding import Topology, Workload, choose
from sparing.sharding.planner.choose import crossover
from sparing.sharding.planner.config import Link
from sparing.sharding.planner.unequal import arrangements
from sparing.sharding.planner.wire_choices import wire_choices

_LINKS = {"intra": (8, 900e9), "middle": (8, 50e9), "inter": (4, 3e9)}
RACKS = Topology(axes=[Link(name=name, size=size, rate=rate) for name, (size, rate) in _LINKS.items()])
"""NVLink domains of eight at 7200 Gbit/s, eight in a rack at 400, and four racks at 24."""
MEMORIES = ("24GB", "80GB")
WORK = Workload(params=65e9, accumulate=4, blocks=80)
PAIRS = Topology(groups=2, per_group=8, inter="80Gbps", intra="2000Gbps", sharing=8)
UNEQUAL = ((8, 8, 8), (8, 8, 4), (8, 8, 7))
RATIOS = (1, 5, 25)


def tiers() -> str:
    """The best plan for 65B on 256 GPUs as three kinds of links grow apart."""
    lines = []
    for memory in MEMORIES:
        cells = crossover(
            WORK, RACKS, ratios=RATIOS, middles=RATIOS, accumulates=(4,), trainables=(1,), memory=memory
        )  # fmt: skip
        for middle in RATIOS:
            row = [cell for cell in cells if cell.middle == middle]
            lines.append([memory, f"{middle} : 1", *(f"{c.plan}, {c.seconds:.3g} s" if c.plan else "–" for c in row)])
    return table(["memory", "domain : rack", *(f"rack : site {ratio} : 1" for ratio in RATIOS)], lines)


def unequal() -> str:
    """Groups of unequal size cut into equal ones: 7B with Adam."""
    work, lines = Workload(params=7e9, accumulate=4, blocks=32, seconds_forward=0.05), []
    for sizes in UNEQUAL:
        for one in arrangements(sizes, PAIRS):
            best, (per_group, groups) = choose(work, one.topology, "80GB", top=1).best, one.topology.sizes
            lines.append([
                ", ".join(map(str, sizes)), f"{groups} × {per_group}", one.left_out, best.plan.name,
                f"{best.seconds:.3g}", f"{one.ranks * work.accumulate / best.seconds:.3g}",
            ])  # fmt: skip
    head = ["GPUs of each group", "cut into", "left out", "best plan", "s per step", "micro-batches per s"]
    return table(head, lines)


def wires(record: Record) -> str:
    """Ways to use the wires of the reference cell, as its links are held, with the arithmetic that was measured."""
    work = workload(REFERENCE, by_cell(record.table("arms"))[REFERENCE]["alone"])
    lines = [
        [way.name, way.plan.name, f"{way.seconds:.2f}", f"{way.leaving / 2**20:.1f}"]
        for way in wire_choices(work, nominal(REFERENCE))
        if way.plan is not None and way.seconds is not None and way.leaving is not None
    ]
    return table(["rings", "best plan", "s per step, simulated", "MiB out of a group"], lines)


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    reference = Record.read(Path(__file__).parents[1] / "results" / "network_reference.jsonl")
    print(wires(reference), tiers(), unequal(), sep="\n\n")


if __name__ == "__main__":
    main()
