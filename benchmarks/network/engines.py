r"""The same cells on both engines: seconds of a whole step of every plan, and their ratio round by round.

    python -m benchmarks.network.sweep --arms alone,engines --grid --shape 2x2 --ratio 25,1,5 --accumulate 4,1 \
        --trainable 1 --rounds 5 --seconds 4 --steps 3 --out benchmarks/results/network_engines.jsonl
    python -m benchmarks.network.engines    # the tables; the sweep needs root and an idle machine, and is resumable

In a sweep both engines are built in the same processes, on the same meshes and rings, and take turns: a round's ratio
compares neighbours in time. Rows that were not measured in one go are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory_tables import table as markdown
from benchmarks.network.arms import FSDP2
from benchmarks.network.cells import Cell
from sparing.report import Record

RESULT = Path(__file__).parents[1] / "results" / "network_engines.jsonl"
OURS, THEIRS, EVEN = "sparing", "fsdp2", "not told apart"


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
        return OURS if self.low > 1 else THEIRS if self.high < 1 else EVEN


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


def summary(found: Sequence[Pair]) -> str:
    """In Markdown, a row for each cell: the ratio over its plans, and which engine is faster in how many of them."""
    lines = []
    for cell in dict.fromkeys(one.cell for one in found):
        here = [one for one in found if one.cell == cell]
        ratios, wins = [one.ratio for one in here], Counter(one.faster for one in here)
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        counts = [str(wins[name]) for name in (OURS, THEIRS, EVEN)]
        lines.append([_network(cell), str(cell.accumulate), str(len(here)), ratio, *counts])
    head = ["network", "s", "plans", "fsdp2 / sparing, median over plans [least, most]", "sparing faster"]
    return markdown([*head, "fsdp2 faster", EVEN], lines)


def _network(cell: Cell) -> str:
    return f"{cell.groups}×{cell.per_group}, {cell.inter / 1e6:g} / {cell.intra / 1e6:g} Mbit/s"


def table(found: Sequence[Pair]) -> str:
    """In Markdown, a row for each pair."""
    lines = [
        [_network(one.cell), str(one.cell.accumulate), one.plan, f"{one.ours:.3f}", f"{one.theirs:.3f}",
         f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]", one.faster]
        for one in found
    ]  # fmt: skip
    head = ["network", "s", "plan", "sparing, s", "fsdp2, s", "fsdp2 / sparing, rounds", "faster in every round"]
    return markdown(head, lines)


def main() -> None:
    """Print both tables of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULT)
    options = parser.parse_args()
    found = list(pairs(Record.read(options.file).rows))
    sys.stdout.write(f"{summary(found)}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
