"""Tables of fields by least squares in Markdown, from their committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.memory_tables import table

RESULT = Path(__file__).parent / "results" / "pde_fields.json"
Cells = dict[str, Any]


def document() -> dict[str, list[Cells]]:
    """The committed tables."""
    tables: dict[str, list[Cells]] = json.loads(RESULT.read_text(encoding="utf-8"))["tables"]
    return tables


def fields() -> str:
    """Error, cost and coverage by row, beside the constant first guess."""
    lines = []
    for row in document()["summary"]:
        field, noisy = ", field" in row["name"], "1 %" in row["name"]
        guess = f"{100 * row['guess_error']:.0f}" if field else "–"
        covered = f"{100 * row['covered']:.0f}{_error(row, 'covered')}" if field and noisy else "–"
        freedom = f"{row['freedom']:.0f}" if field and "freedom" in row else "–"
        lines.append([
            row["name"], f"{100 * row['coefficient_error']:.2g}", f"{100 * row['coefficient_error_most']:.2g}", guess,
            f"{row['solves']:.0f}", f"{row['seconds']:.0f}", covered, freedom, row["n"],
        ])  # fmt: skip
    head = ["", "ε of ν, %", "worst, %", "first guess, %", "solves", "CPU s", "90 % intervals hold, %", "decided", "n"]
    return table(head, lines)


def plane() -> str:
    """A field of two dimensions, by arm; Adam at the rate that ends lowest in what it minimizes."""
    rows = json.loads((RESULT.parent / "pde_field_2d.json").read_text(encoding="utf-8"))["rows"]
    runs: dict[str, list[Cells]] = {}
    for key, row in rows.items():
        runs.setdefault(row["arm"], []).append(row | {"draw": int(key.rsplit(", ", 1)[1])})
    by_draw: dict[int, list[Cells]] = {}
    for row in runs.pop("Adam", []):
        by_draw.setdefault(row["draw"], []).append(row)
    runs["16 × 16, 1 % noise: Adam, as many solves"] = [
        min(tried, key=lambda row: float(row["value"])) for tried in by_draw.values()
    ]
    lines = []
    for arm, found in runs.items():
        off = [100 * row["error"] for row in found]
        covered = f"{100 * fmean(row['covered'] for row in found):.0f}" if "covered" in found[0] else "–"
        freedom = f"{fmean(row['freedom'] for row in found):.0f}" if "freedom" in found[0] else "–"
        lines.append([
            arm, f"{fmean(off):.1f}", f"{max(off):.1f}", f"{fmean(row['solves'] for row in found):.0f}",
            f"{fmean(row['seconds'] for row in found):.0f}", covered, freedom, found[0]["unknowns"], len(found),
        ])  # fmt: skip
    head = ["", "ε of κ, %", "worst, %", "solves", "CPU s", "90 % intervals hold, %", "decided", "unknowns", "n"]
    return table(head, lines)


def bars() -> str:
    """What was aimed at, beside what is there."""
    rows = {row["name"]: row for row in document()["summary"]}
    lines = []
    for name, most in (("no noise", 0.02), ("1 % noise", 0.07)):
        for equation in ("burgers", "allen-cahn"):
            row = rows.get(f"{equation}, field, {name}")
            if row is None:
                continue
            lines.append(
                _bar(f"{equation}, {name}: worst ε of ν, %", 100 * row["coefficient_error_most"], 100 * most, row)
            )
            lines.append(_bar(f"{equation}, {name}: most CPU s", row["seconds_most"], 30, row))
    kdv = [row for row in document()["runs"] if row["name"].startswith("kdv")]
    found = sum(row["coefficient_error"] < 0.01 for row in kdv)
    lines.append(
        [f"kdv: runs that find ν within 1 %, of {len(kdv)}", found, 5, "met" if found >= 5 else "missed", len(kdv)]
    )
    return table(["bar", "measured", "bar", "", "n"], lines)


def _bar(name: str, value: float, most: float, row: Cells) -> list[Any]:
    return [name, f"{value:.2g}", f"{most:.2g}", "met" if value <= most else "missed", row["n"]]


def priors() -> str:
    """Error and coverage in the linearized problem, by order of the penalized derivative and rule."""
    lines = [
        [row["equation"], row["order"], row["rule"], f"{100 * row['coefficient_error']:.1f}",
         f"{100 * row['coefficient_error_most']:.1f}", f"{100 * row['covered']:.0f}{_error(row, 'covered')}"]
        for row in document()["linear"]
    ]  # fmt: skip
    return table(["", "order", "penalty by", "ε of ν, %", "worst, %", "90 % intervals hold, %"], lines)


def _error(row: Cells, name: str) -> str:
    error = row.get(f"{name}_se")
    return "" if error is None else f" ± {100 * error:.1f}"
