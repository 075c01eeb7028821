r"""The same cells on both engines: seconds of a whole step of every plan, and their ratio round by round.

    python -m benchmarks.network.sweep --arms engines --grid --shape 2x2 --ratio 25,5,1 --accumulate 1,4 \
        --trainable 1 --rounds 7 --out benchmarks/results/network_engines.jsonl   # idle machine, root; goes on
    python -m benchmarks.network.engines                                    # the table

In a sweep both engines are built in the same processes, on the same meshes and rings, and take turns: a round's ratio
compares neighbours in time. Rows that were not measured in one go are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network.arms import FSDP2
from benchmarks.network.cells import Cell
from sparing.report import Record

RESULT = Path(__file__).parents[1] / "results" / "network_engines.jsonl"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A plan in a cell: our engine, PyTorch's, and the ratio theirs / ours."""

    cell: Cell
    plan: str
    ours: float  # seconds, median over rounds
    theirs: float
    ratio: float  # median over rounds
    low: float  # of the rounds
    high: float

    @property
    def faster(self) -> str:
        """Which engine is faster in every round."""
        return "sparing" if self.low > 1 else "fsdp2" if self.high < 1 else "not told apart"


def pairs(rows: Sequence[dict[str, Any]]) -> Iterator[Pair]:
    """Plans whose two rows were measured in one go."""
    found = {
        (Cell(**{name: row[name] for name in Cell().plain()}), row["arm"]): row
        for row in rows
        if row["table"] == "arms"
    }
    for (cell, plan), ours in found.items():
        theirs = found.get((cell, plan + FSDP2))
        if theirs is None or ours["run"] != theirs["run"]:
            continue
        rounds = [[float(text) for text in row["rounds"].split()] for row in (ours, theirs)]
        ratios = [b / a for a, b in zip(*rounds, strict=True)]
        yield Pair(
            cell=cell, plan=plan, ours=statistics.median(rounds[0]), theirs=statistics.median(rounds[1]),
            ratio=statistics.median(ratios), low=min(ratios), high=max(ratios),
        )  # fmt: skip


def table(found: Sequence[Pair]) -> str:
    """In Markdown, a row for each pair."""
    lines = [
        "| network | s | trains | plan | sparing, s | fsdp2, s | fsdp2 / sparing, rounds | faster in every round |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        cell = one.cell
        network = f"{cell.groups}×{cell.per_group}, {cell.inter / 1e6:g} / {cell.intra / 1e6:g} Mbit/s"
        ratio = f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]"
        lines.append(
            f"| {network} | {cell.accumulate} | {cell.trainable:.3g} | {one.plan} | {one.ours:.3f} | {one.theirs:.3f} "
            f"| {ratio} | {one.faster} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULT)
    options = parser.parse_args()
    sys.stdout.write(table(list(pairs(Record.read(options.file).rows))) + "\n")


if __name__ == "__main__":
    main()
