"""Tables of attribution in Markdown, from the committed JSON: predictions against retraining, and beside bergson."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.memory_tables import table

RESULT = Path(__file__).parent / "results" / "attribution.json"
PEERS = RESULT.with_name("attribution_peers.json")

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


def _peer_rows(table_name: str) -> list[dict[str, Any]]:
    rows = json.loads(PEERS.read_text(encoding="utf-8"))["rows"].values()
    return [row for row in rows if row["table"] == table_name]


def agreement() -> str:
    """Relative differences in float64: between the two, and of each from differences of its own training."""
    lines = [
        [row["case"], *(f"{row[name]:.0e}" for name in ("difference", "sparing", "bergson", "runs"))]
        for row in _peer_rows("checks")
    ]
    head = ["", "bergson to sparing", "sparing to its run", "bergson to its run", "bergson's run to torch.optim's"]
    return table(head, lines)


def costs() -> str:
    """Seconds of a whole attribution in turn, their ratio round by round, and bytes of a fresh process."""
    held = {(row["case"], row["arm"]): row["peak"] for row in _peer_rows("bytes")}
    lines = []
    for row in _peer_rows("times"):
        ours = row["seconds"]["sparing"]
        for arm, taken in row["seconds"].items():
            ratios = [b / a for a, b in zip(ours["cpu"], taken["cpu"], strict=True)]
            peak = held.get((row["case"], arm))
            lines.append([
                f"{row['case']}: {arm}", f"{statistics.median(taken['cpu']):.1f}",
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
                "–" if peak is None else f"{peak / 2**20:.0f}", f"{row['difference'][arm]:.0e}", len(ratios),
            ])  # fmt: skip
    return table(["", "CPU s", "× sparing's", "MiB", "difference", "n"], lines)
