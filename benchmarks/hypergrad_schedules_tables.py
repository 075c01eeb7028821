"""Table of ``docs/results/hypergradients.md`` about few outer parameters, from ``hypergrad_schedules.json``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.federated.paired import differences
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import mean

RESULT = Path(__file__).parent / "results" / "hypergrad_schedules.json"
OURS = "(FG)²U b=4"


def ends() -> str:
    """Loss on test pages by arm, beside that of (FG)²U with the same seeds; the lowest first."""
    rows: dict[str, dict[int, Any]] = {}
    for key, row in json.loads(RESULT.read_text())["rows"].items():
        arm, *_, seed = key.split(" | ")
        if "test" in row:
            rows.setdefault(arm, {})[int(seed)] = row
    test = {arm: {seed: row["test"] for seed, row in found.items()} for arm, found in rows.items()}
    found = []
    for arm, runs in sorted(rows.items(), key=lambda pair: fmean(test[pair[0]].values())):
        tries = [row["tries"] for row in runs.values() if "tries" in row]
        rates = {row.get("lr") for row in runs.values()}
        found.append([
            arm, mean(test[arm].values(), 3, sign=False),
            "–" if arm == OURS else mean(differences(test[arm], test[OURS]), 3),
            f"{min(tries)} to {max(tries)}" if tries else "–",
            ", ".join(f"{rate:g}" for rate in sorted(filter(None, rates))) or "–", len(runs),
        ])  # fmt: skip
    head = ["", "loss, nats a character", "minus that of (FG)²U b=4", "points tried", "rate of Adam", "n"]
    return table(head, found)
