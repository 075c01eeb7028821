"""The demo: its tables in the terminal, its page of questions and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sparing.jobs.demo.chapter import Chapter
from sparing.jobs.demo.condense import CondenseChapter
from sparing.jobs.demo.federate_page import FederateChapter
from sparing.jobs.demo.memory_page import MemoryChapter
from sparing.jobs.demo.settings import Name
from sparing.jobs.demo.shard_page import ShardChapter
from sparing.jobs.demo.transfer import TransferChapter
from sparing.jobs.demo.valley_page import ValleyChapter
from sparing.jobs.folder import print_page_path
from sparing.report import Page, Record, format_number, print_table

CHAPTERS: Final[tuple[type[Chapter], ...]] = (
    MemoryChapter, CondenseChapter, TransferChapter, ShardChapter, ValleyChapter, FederateChapter,
)  # fmt: skip
"""In the order of the page."""

CAVEATS: Final = (
    "Small runs, three seeds where methods are close: a demonstration, not a comparison of quality.",
    "A difference is named only where its 95 % interval excludes zero; with three seeds intervals are wide.",
    "Measured comparisons, with their commands, seeds and intervals, are in docs/results.md.",
    "Figures of the papers are their authors', on their machines; they are not measured here.",
)


def finished(record: Record) -> list[Name]:
    """The chapters that a record holds whole, in the order of the page."""
    return [kind.name for kind in CHAPTERS if len(record.table(kind.complete[0])) >= kind.complete[1]]


def chapters_of(record: Record, folder: Path) -> list[Chapter]:
    """The chapters of the page, those that are done."""
    done = finished(record)
    return [kind(record, folder) for kind in CHAPTERS if kind.name in done]


def opening(record: Record) -> str:
    """What the page is, and what made it."""
    count, took = len(finished(record)), sum(row["seconds"] for row in record.table("chapters"))
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
    chapters, done = chapters_of(record, path.parent), finished(record)
    more = "sparing demo --resume --chapters"
    missing = [f"{kind.saves} (`{more} {kind.name}`)" for kind in CHAPTERS if kind.name not in done]
    spent = [f"{row['chapter']} {format_number(row['seconds'], 's')}" for row in record.table("chapters")]
    worked = sum(row["cpu_seconds"] for row in record.table("chapters"))
    facts: dict[str, Any] = {
        "scale": record.settings["scale"],
        "time": f"{', '.join(spent)}; {format_number(worked, 's')} of CPU time",
    }
    known = dict.fromkeys(licence for chapter in chapters for licence in chapter.licences())
    facts["licences"] = "; ".join(f"{name}: {licence}" for name, licence in known)
    page = Page(
        title="sparing: training with little",
        question=record.question, answer=opening(record), record=record, caveats=CAVEATS, reproduce=facts,
        sections=[chapter.section for chapter in chapters],
        note=f"Not run here: {'; '.join(missing)}." if missing else "",
    )  # fmt: skip
    page.write(path)


def show(record: Record) -> None:
    """Print a table for each chapter, and where the page is."""
    for chapter in chapters_of(record, Path(record.settings["out"])):
        table = chapter.tables()[0]
        print_table(table.rows, title=table.title, units=table.units, columns=table.columns, roles=table.roles)
    print_page_path(record)
