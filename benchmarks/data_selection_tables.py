"""Tables of ``docs/results/hypergradients.md`` about chosen training rows, from ``data_selection.json``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.federated.paired import differences
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import mean

RESULT = Path(__file__).parent / "results" / "data_selection.json"
META = "metagradients"
CASES = {
    "mnist, wrong labels": "wrong labels", "mnist, wrong labels and near-copies": "and near-copies",
    "fashion-mnist, wrong labels and near-copies": "the same of Fashion-MNIST",
}  # fmt: skip
"""In the order of the table, and what its head calls them."""
EVERYWHERE = ("whole pool", "checked alone", "checked + whole pool")
SHORT = (
    "random", "best random", "lowest loss", "highest loss", "agreed", "influence, one step", META, "checked alone",
    "whole pool", "checked + random", "checked + whole pool", "checked + agreed", f"checked + {META}",
    "right and distinct",
)  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list(json.loads(RESULT.read_text(encoding="utf-8"))["rows"].values())
    return found


def _runs() -> dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]]:
    """Rows by (case, kept), arm and seed, of the seeds that all arms have; those of no size stand in every one."""
    runs = [row for row in _rows() if row["table"] == "runs"]
    # the arm that is measured last, so that the seeds it has are those that all have
    whole = {(row["case"], row["kept"], row["seed"]) for row in runs if row["arm"] == f"checked + {META}"}
    cells: dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]] = {}
    for case, kept, seed in sorted(whole, key=lambda cell: (tuple(CASES).index(cell[0]), *cell[1:])):
        for row in runs:
            here = row["kept"] == kept or row["arm"] in EVERYWHERE
            if (row["case"], row["seed"]) == (case, seed) and here:
                cells.setdefault((case, kept), {}).setdefault(row["arm"], {})[seed] = row
    return cells


def overview() -> str:
    """Mean test loss by case and size, a few arms."""
    cells, lines = _runs(), []
    for arm in SHORT:
        means = [fmean(row["test"] for row in cell[arm].values()) for cell in cells.values()]
        lines.append([arm, *(f"{one:.2f}" for one in means)])
    head = [f"{CASES[case]}, {kept} rows (n = {len(cell[META])})" for (case, kept), cell in cells.items()]
    return table(["test loss (nat)", *head], lines)


def every() -> str:
    """Every arm of every case: loss, the difference to metagradients with the same seeds, accuracy, what was kept."""
    lines = []
    for (case, kept), arms in _runs().items():
        test = {arm: {seed: row["test"] for seed, row in rows.items()} for arm, rows in arms.items()}
        for arm, rows in sorted(arms.items(), key=lambda pair: fmean(test[pair[0]].values())):
            others = differences(test[arm], test[META])
            means = [_mean(rows.values(), name) for name in ("accuracy", "checked", "right", "copied")]
            rates = sorted({row["lr"] for row in rows.values()})
            lines.append([
                f"{case}, {kept}: {arm}", mean(test[arm].values(), 3, sign=False),
                "–" if arm == META else mean(others, 3),
                "–" if arm == META else f"{sum(value > 0 for value in others)} of {len(others)}",
                *("–" if value is None else f"{value:.2f}" for value in means),
                ", ".join(f"{rate:g}" for rate in rates), len(rows),
            ])  # fmt: skip
    head = ["", "test loss (nat)", f"minus that of {META}", "above it", "accuracy", "loss of checked", "right",
            "copies", "rates", "n"]  # fmt: skip
    return table(head, lines)


def weights() -> str:
    """Ways to weigh all rows of the pool: loss by case, and what it has over learnt weights with the same seeds.

    Weights beside the checked rows are compared with learnt ones beside them.
    """
    alike = {"whole pool": "all alike", "checked alone": "checked alone", "checked + whole pool": "checked + all alike"}
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in _rows():
        arm = row["arm"] if row["table"] == "weights" else alike.get(row.get("arm", ""))
        if arm is not None:
            found.setdefault(arm, {})[row["case"], row["seed"]] = row["test"]
    whole = set.intersection(*(set(cells) for cells in found.values()))
    arms = {
        arm: {case: {seed: cells[case, seed] for of, seed in sorted(whole) if of == case} for case in CASES}
        for arm, cells in found.items()
    }
    lines = []
    for arm, cells in sorted(arms.items(), key=lambda pair: sum(fmean(cell.values()) for cell in pair[1].values())):
        other = f"checked + by {META}" if arm.startswith("checked + ") else f"by {META}"
        line = [arm]
        for case in CASES:
            line.append(f"{fmean(cells[case].values()):.2f}")
            line.append("–" if arm == other else mean(differences(cells[case], arms[other][case]), 2))
        lines.append(line)
    count = {case: sum(of == case for of, _ in whole) for case in CASES}
    head = [one for case, title in CASES.items() for one in (f"{title}, nat (n = {count[case]})", "minus learnt")]
    return table(["weights", *head], lines)


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
    return table(head, lines)
