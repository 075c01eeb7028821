"""Rebuild every table of ``docs/results/`` from the committed JSON; ``python -m benchmarks.results``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import federated_tables, hypergrad_tables, network_tables, scaling_tables, valley_tables
from benchmarks.memory_tables import with_tables
from benchmarks.step_tables import filled
from sparing.report import Record

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"


def pages() -> dict[Path, str]:
    """Every page of results, as the committed JSON makes it."""
    names = ("memory", "step-time", "hypergradients", "scaling", "sharding", "valley", "federated")
    memory, speed, hyper, scaling, sharding, valley, federated = (PAGES / f"{name}.md" for name in names)
    rows = list(json.loads((RESULTS / "memory_grid.json").read_text())["rows"].values())
    return {
        memory: with_tables(memory.read_text(), rows),
        speed: filled(speed.read_text(), Record.read(RESULTS / "step_time.jsonl")),
        hyper: hypergrad_tables.filled(hyper.read_text()),
        scaling: scaling_tables.filled(scaling.read_text()),
        sharding: network_tables.filled(sharding.read_text()),
        valley: valley_tables.filled(valley.read_text()),
        federated: federated_tables.filled(federated.read_text()),
    }


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
