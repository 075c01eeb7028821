"""The table of predicted against retrained losses in Markdown, from its committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.memory_tables import table

RESULT = Path(__file__).parent / "results" / "attribution.json"

WAYS = ("exact", "grad-dot", "grad-cosine", "random")

BARS = {"mnist": 0.95, "alice": 0.9}


def ranks() -> str:
    """Rank correlations by case and way, beside the score of smoothness that is known before."""
    lines = []
    for row in json.loads(RESULT.read_text(encoding="utf-8"))["tables"]["summary"]:
        cells = [f"{row[f'{way}_each']:.2f}{_error(row, f'{way}_each')}" for way in WAYS]
        bar = BARS[row["case"].split(",")[0]]
        met = "met" if row["exact_each"] >= bar else "missed"
        cost = f"{row['seconds'] / row['plain_seconds']:.0f}×"
        lines.append([
            row["case"], f"{row['metasmoothness']:.2f}", f"{row['bend']:.2f}", f"{row['error']:.2g}", *cells,
            f"{row['exact_mean']:.2f}", f"{bar:g}: {met}", cost, row["n"],
        ])  # fmt: skip
    head = ["", "metasmoothness", "bend", "error", *WAYS, "exact, of the mean", "bar", "cost", "n"]
    return table(head, lines)


def _error(row: dict[str, Any], column: str) -> str:
    return "" if row[f"{column}_se"] is None else f" ± {row[f'{column}_se']:.2f}"
