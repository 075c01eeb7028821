"""Display of a plan: the table in the terminal, the page with its picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from sparing.jobs.plan.pick import RULE
from sparing.memory import CATEGORIES
from sparing.report import Figure, Page, Record, Section, Table, format_number, plots, print_table

COLUMNS: Final = ("way", "trainable", "peak", "speed", "verdict")


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    (about,) = record.table("about")
    print_table(record.table("plan"), title=title(record), units=record.units, columns=list(COLUMNS))
    notes = [f"note: {row['note']}" for row in record.table("advice")]
    why = [str(about["why"])] if about["why"] else []
    sys.stdout.write("\n".join([f"pick: {about['pick']}", *why, *notes, f"report: {about['page']}"]) + "\n")


def title(record: Record) -> str:
    """Model, parameters and memory in a line."""
    (about,) = record.table("about")
    return (
        f"{about['model']} ({format_number(about['parameters'])} parameters), "
        f"batch {about['batch']} × {about['length']} tokens, {about['device']}"
    )


def answer(record: Record) -> str:
    """One sentence with its number."""
    (about,) = record.table("about")
    chosen = next((row for row in record.table("plan") if row["picked"]), None)
    if chosen is None:
        rows = [row for row in record.table("plan") if row["peak"] is not None]
        if not rows:
            return "No way to fine-tune this model could be priced; the table says why."
        least = min(rows, key=lambda row: float(row["peak"] or 0))
        held = format_number(least["peak"], "B")
        return f"Nothing fits {about['device']}; the least is {least['way']} at **{held}**."
    held = format_number(chosen["peak"], "B")
    return f"**{chosen['way']}**: **{held}** of {about['device']}; {about['why']}."


def figures(record: Record) -> list[Figure]:
    """Bytes at the peak by category, without checkpointing, against the memory; nothing if nothing was priced."""
    (about,) = record.table("about")
    priced = [row for row in record.table("plan") if row["peak"] is not None]
    rows: list[dict[str, Any]] = [row for row in priced if not row["checkpointing"]]
    if not rows:
        return []
    stacks = [plots.Stack(row["method"], {part: row[part] for part in CATEGORIES}) for row in rows]
    fitting = sum(bool(row["fits"]) for row in rows)
    memory: Any = about["memory"]
    bars = plots.stacked_bars(
        stacks, value=plots.Axis("peak of a step", unit="B"),
        title=f"{fitting} of {len(rows)} fit without checkpointing",
        mark=(memory, str(about["device"])),
        caption="Predicted from shapes; allocator rounding, kernel workspaces and the device's context come on top.",
    )  # fmt: skip
    return [bars]


def write_page(record: Record, path: Path) -> None:
    """Write the page."""
    rows, units = record.table("plan"), record.units
    table = Table(rows, title=title(record), units=units, columns=list(COLUMNS), note=RULE)
    parts = Table(rows, title="At the peak of a step", units=units, columns=["way", *CATEGORIES, "coverage"])
    notes = [str(row["note"]) for row in record.table("advice")]
    page = Page(
        title="What fits", question=record.question, answer=answer(record), record=record,
        sections=[Section("By method", figures=figures(record), tables=[table, parts])],
        caveats=[*notes, "LISA is priced at its dearest draw: with a frozen embedding, the lowest blocks."],
    )  # fmt: skip
    page.write(path)
