"""The demo: its tables in the terminal, its page of questions and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sparing.jobs.condense.methods import ROLES as CONDENSERS
from sparing.jobs.demo import condensation_page, federated_page, layers_page, sharding_page, transfer_page, valley_page
from sparing.jobs.demo.chapter import Chapter
from sparing.jobs.demo.condensation import WORKS as CONDENSE
from sparing.jobs.demo.federated import WORKS as FEDERATE
from sparing.jobs.demo.settings import NAMES, Name, Scale
from sparing.jobs.demo.sharding import WORKS as SHARD
from sparing.jobs.demo.transfer import WORKS as TRANSFER
from sparing.jobs.transfer.figures import ROLES as RULES
from sparing.report import Page, Record, format_number, print_table

COMPLETE: Final[dict[Name, tuple[str, int]]] = {
    "memory": ("arms", 4), "condense": ("condensed", 3), "transfer": ("coordinates", 1), "shard": ("shards", 1),
    "valley": ("valley_merges", 2), "federate": ("federated_methods", 5),
}  # fmt: skip
"""The table that a chapter fills last, and its rows when it is done (count)."""

TOPICS: Final[dict[Name, str]] = {
    "memory": "fine-tuning memory", "condense": "long inner runs", "transfer": "tuning sparse nets",
    "shard": "slow networks", "valley": "merging nets", "federate": "data that stay put",
}  # fmt: skip

CAVEATS: Final = (
    "One seed and small runs: a demonstration, not a comparison of quality.",
    "Measured comparisons, with their commands, seeds and intervals, are in docs/results.md.",
    "Figures of the papers are their authors', on their machines; they are not measured here.",
)


def finished(record: Record) -> list[Name]:
    """The chapters that a record holds whole, in the order of the page."""
    return [name for name in NAMES if len(record.table(COMPLETE[name][0])) >= COMPLETE[name][1]]


def _makers(record: Record, folder: Path) -> dict[Name, Callable[[], Chapter]]:
    """What makes each chapter of the page."""
    scale: Scale = record.settings["scale"]
    return {
        "memory": lambda: layers_page.chapter(record, scale),
        "condense": lambda: condensation_page.chapter(record, CONDENSE[scale], folder),
        "transfer": lambda: transfer_page.chapter(record, TRANSFER[scale]),
        "shard": lambda: sharding_page.chapter(record, SHARD[scale]),
        "valley": lambda: valley_page.chapter(record),
        "federate": lambda: federated_page.chapter(record, FEDERATE[scale]),
    }


def chapters_of(record: Record, folder: Path) -> list[Chapter]:
    """The chapters of the page, those that are done."""
    makers = _makers(record, folder)
    return [makers[name]() for name in finished(record)]


def times(record: Record) -> dict[str, dict[str, float]]:
    """Seconds, by the clock and of the processors, that each chapter took, interrupted and resumed parts together."""
    found: dict[str, dict[str, float]] = {}
    for row in record.table("chapters"):
        sums = found.setdefault(row["chapter"], {"seconds": 0.0, "cpu_seconds": 0.0})
        for name in sums:
            sums[name] += row[name]
    return found


def opening(record: Record) -> str:
    """What the page is, and what made it."""
    count, took = len(finished(record)), sum(row["seconds"] for row in times(record).values())
    parts = [
        f"One command ran **{count} small experiment{'s' if count > 1 else ''}** on real data on this machine"
        + (f" in {format_number(took, 's')}" if took else "")
        + ", without a GPU. Each chapter asks one question, answers it with what was measured, and puts the figure of "
        "the paper it comes from beside ours; you need not know the papers."
    ]
    if record.settings["scale"] == "tiny":
        parts.append(
            "The scale is **tiny**: budgets are cut so far that methods which are close are not told apart, and single "
            "numbers mean little. `sparing demo` runs the scale that is meant, small, in about ten minutes."
        )
    return " ".join(parts)


def write_page(record: Record, path: Path) -> None:
    """Write the page of a demo with at least one finished chapter."""
    done = finished(record)
    more = "sparing demo --resume --chapters"
    missing = [f"{TOPICS[name]} (`{more} {name}`)" for name in NAMES if name not in done]
    spent = ", ".join(f"{name} {format_number(row['seconds'], 's')}" for name, row in times(record).items())
    inputs = record.table("materials")
    facts: dict[str, Any] = {"scale": record.settings["scale"], "time": spent}
    if inputs:
        facts["licences"] = inputs[0]["licence"]
    page = Page(
        title="sparing: training with little",
        question=record.question, answer=opening(record), record=record, caveats=CAVEATS, reproduce=facts,
        sections=[chapter.section for chapter in chapters_of(record, path.parent)],
        note=f"Not run here: {'; '.join(missing)}." if missing else "",
    )  # fmt: skip
    page.write(path)


def show(record: Record) -> None:
    """Print a table for each chapter, and where the page is."""
    scale: Scale = record.settings["scale"]
    for name in finished(record):
        rows, title, options = _table(name, record, scale)
        if rows:
            print_table(rows, title=title, **options)
    sys.stdout.write(f"report: {record.table('run')[-1]['page']}\n")


def _table(name: Name, record: Record, scale: Scale) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Rows, title and settings of a chapter's table in the terminal."""
    if name == "memory":
        title = record.table("materials")[0]["name"]
        options = _options(layers_page.UNITS, layers_page.COLUMNS, layers_page.ROLES)
        return layers_page.rows_of(record), title, options
    if name == "condense":
        title, columns = "One condensed image per class, equal CPU time", condensation_page.COLUMNS
        return condensation_page.rows_of(record), title, _options(record.units, columns, CONDENSERS)
    if name == "transfer":
        rows = transfer_page.rows_of(transfer_page.study_of(record, TRANSFER[scale]))
        return rows, "Best rates and losses by density", _options(transfer_page.UNITS, transfer_page.COLUMNS, RULES)
    if name == "shard":
        title = "Four processes, two groups: bytes and seconds"
        options = _options(sharding_page.UNITS, sharding_page.COLUMNS, sharding_page.ROLES)
        return sharding_page.rows_of(record), title, options
    if name == "valley":
        title = "Two averages of two nets: gaps predicted and measured"
        options = _options(valley_page.UNITS, valley_page.COLUMNS, valley_page.ROLES)
        return valley_page.rows_of(record), title, options
    options = _options(federated_page.UNITS, federated_page.COLUMNS, federated_page.roles(FEDERATE[scale]))
    return federated_page.rows_of(record, FEDERATE[scale]), "One hundred clients that keep their data", options


def _options(units: Any, columns: Any, roles: Any) -> dict[str, Any]:
    return {"units": dict(units), "columns": list(columns), "roles": roles}
