"""Tables of fields by least squares in Markdown, from their committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
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
