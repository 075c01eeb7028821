"""Tables of the step times in Markdown, between the marks of ``docs/results/step-time.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import table
from sparing.report import Record

Row = dict[str, Any]


def warm(record: Record, heap: str) -> str:
    """Median milliseconds by phase, page faults, and how many times faster than full, with least and most."""
    lines = [
        [f"{row['model']}, {row['threads']} thread{'s' * (row['threads'] > 1)}, {row['arm']}",
         *(f"{1000 * row[phase]:.0f}" for phase in ("forward", "backward", "optimizer", "total")),
         f"{row['faults_passes'] + row['faults_step']:,.0f}",
         f"{row['faster']:.2f}× [{row['faster_min']:.2f}, {row['faster_max']:.2f}]", row["n"]]
        for row in record.table("warm") if row["heap"] == heap
    ]  # fmt: skip
    head = ["median, ms", "forward", "backward", "optimizer", "step", "page faults", "against full", "n"]
    return table(head, lines)


def cold(record: Record) -> str:
    """First and later steps: forward milliseconds of fresh processes, and of one process that never warmed up."""
    rows: list[Row] = record.table("cold")
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm and row["process"] == "own"]
        shared = next(row for row in rows if row["arm"] == arm and row["process"] == "shared")
        later = sorted(row["forward"] for row in own[1:])[len(own[1:]) // 2]
        lines.append([arm, *(f"{1000 * value:.0f}" for value in (own[0]["forward"], later, shared["forward"]))])
    head = [
        "forward, ms",
        "first step of its own process",
        "later steps (median)",
        "first step, one process, in this order",
    ]
    return table(head, lines)


def machine(record: Record) -> str:
    """Where it was measured."""
    place = record.environment
    known = [f"{place[name]}" for name in ("cpu", "platform") if place.get(name)]
    versions = [f"{name} {place[name]}" for name in ("python", "torch", "transformers", "peft") if place.get(name)]
    return f"{', '.join(known)}; {place.get('threads')} threads; {', '.join(versions)}; commit {place.get('commit')}."


PARTS: dict[str, Callable[[Record], str]] = {
    "warm": lambda record: warm(record, "glibc's own"), "kept": lambda record: warm(record, "buffers kept"),
    "cold": cold, "machine": machine,
}  # fmt: skip


def filled(page: str, record: Record) -> str:
    """Return the page with the text between ``<!-- name -->`` and ``<!-- /name -->`` made anew."""
    return marked(page, {name: make(record) for name, make in PARTS.items()})
