"""Tables of ``docs/results/hypergradients.md`` about chosen training rows, from ``data_selection.json``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.federated.paired import differences
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import MINUS, mean

RESULT = Path(__file__).parent / "results" / "data_selection.json"
META = "metagradients"
SHORT = ("random", "best random", "lowest loss", "highest loss", "agreed", "influence, one step", META, "checked alone",
         "whole pool", "checked + agreed", f"checked + {META}")  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list(json.loads(RESULT.read_text(encoding="utf-8"))["rows"].values())
    return found


def _runs() -> dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]]:
    """Rows by (case, kept), arm and seed; arms that keep all of the pool or none stand in every size."""
    runs = [row for row in _rows() if row["table"] == "runs"]
    sizes = {(row["case"], row["kept"]) for row in runs if row["arm"] == META}
    cells: dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]] = {size: {} for size in sorted(sizes)}
    for row in runs:
        for case, kept in sizes:
            everywhere = row["arm"] in {"whole pool", "checked alone", "checked + whole pool"}
            if row["case"] == case and (everywhere or row["kept"] == kept):
                cells[case, kept].setdefault(row["arm"], {})[row["seed"]] = row
    return cells


def overview() -> str:
    """Mean test loss by case and size, a few arms."""
    cells = _runs()
    lines = []
    for arm in SHORT:
        means = [fmean(row["test"] for row in cell[arm].values()) if arm in cell else None for cell in cells.values()]
        lines.append([arm, *("–" if one is None else f"{one:.2f}" for one in means)])
    return table(["test loss (nat)", *(f"{case}, {kept}" for case, kept in cells)], lines)


def every() -> str:
    """Every arm of every case: loss, the difference to metagradients with the same seeds, accuracy, what was kept."""
    lines = []
    for (case, kept), arms in _runs().items():
        test = {arm: {seed: row["test"] for seed, row in rows.items()} for arm, rows in arms.items()}
        for arm, rows in sorted(arms.items(), key=lambda pair: fmean(test[pair[0]].values())):
            others = differences(test[arm], test[META])
            mean_of = {name: _mean(rows.values(), name) for name in ("accuracy", "checked", "right", "copied")}
            lines.append([
                f"{case}, {kept}: {arm}", mean(test[arm].values(), 3, sign=False),
                "–" if arm == META else mean(others, 3),
                "–" if arm == META else f"{sum(value > 0 for value in others)} of {len(others)}",
                *(f"{value:.2f}" if value is not None else "–" for value in mean_of.values()),
                ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in rows.values()})), len(rows),
            ])  # fmt: skip
    head = ["", "test loss (nat)", f"minus that of {META}", "above it", "accuracy", "loss of checked", "right",
            "copies", "rates", "n"]  # fmt: skip
    return table(head, lines)


def _mean(rows: Any, name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return fmean(values) if values else None


def smooth() -> str:
    """What the check of smoothness said beforehand, and what choices cost."""
    rows, lines = _rows(), []
    for case in dict.fromkeys(row["case"] for row in rows if row["table"] == "smoothness"):
        of = [row for row in rows if row.get("case") == case]
        scores = [row for row in of if row["table"] == "smoothness"]
        arms = {arm: [row for row in of if row.get("arm") == arm] for arm in (META, "influence, one step")}
        tried = [row["tried"] for row in of if row.get("arm") == "best random"]
        lines.append([
            case, f"{min(row['score'] for row in scores):.2f}", f"{max(row['bend'] for row in scores):.2f}",
            *(f"{fmean(row['seconds'] for row in found):.1f}" for found in arms.values()),
            f"{min(tried)} to {max(tried)}", len(scores),
        ])  # fmt: skip
    head = ["", "least metasmoothness", "largest bend", "CPU s of metagradients", "of one step",
            "random choices tried in the same time", "n"]  # fmt: skip
    return table(head, lines).replace("-0.", f"{MINUS}0.")
