"""Tables of what `plan` predicts in Markdown, between the marks of ``docs/results/memory.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import GB, table
from sparing.report import Record

RESULT = Path(__file__).parent / "results" / "plan_cells.jsonl"
Row = dict[str, Any]


def cells(record: Record) -> str:
    """Each family: how far its predictions are from every block run, at most, and processor seconds of both."""
    seconds = {row["family"]: row["plan"] for row in record.table("plans")}
    lines = []
    for family in dict.fromkeys(row["family"] for row in record.table("cells")):
        rows = [row for row in record.table("cells") if row["family"] == family]
        lines.append([
            family, len(rows), f"{max(abs(row['error']) for row in rows):.3f} %",
            f"{sum(row['seconds'] for row in rows):.1f}", f"{sum(row['seconds_every_block'] for row in rows):.1f}",
            f"{seconds[family]:.1f}",
        ])  # fmt: skip
    head = ["", "cells", "farthest from every block", "CPU s, predicted", "CPU s, every block", "CPU s, `sparing plan`"]
    return table(head, lines)


def published(record: Record) -> str:
    """Peaks that others measured, and what each estimator says."""
    lines = [
        [f"{row['model']}, {row['method']}", _gb(row["measured"]),
         *(_beside(row, name) for name in ("predicted", "accelerate", "kitsune")), _bounds(row)]
        for row in record.table("published")
    ]  # fmt: skip
    head = ["GB", "H100", "`sparing plan`", "accelerate", "torch-kitsune", "training_hub, bounds"]
    return table(head, lines)


def _gb(found: float | None) -> str:
    return "out of memory" if found is None else f"{found / GB:.2f}"


def _beside(row: Row, name: str) -> str:
    """Gigabytes, and how far they are from what was measured."""
    found, measured = row.get(name), row["measured"]
    if found is None:
        return "–"
    return f"{found / GB:.2f}" + (f" ({found / measured - 1:+.0%})" if measured else "")


def _bounds(row: Row) -> str:
    if row.get("training_hub_low") is None:
        return "–"
    return f"{row['training_hub_low'] / GB:.1f} to {row['training_hub_high'] / GB:.1f}"


def filled(page: str) -> str:
    """The page of memory with both tables made anew."""
    record = Record.read(RESULT)
    return marked(page, {"plan-cells": cells(record), "plan-published": published(record)})
