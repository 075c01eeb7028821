"""The page of a comparison: curves over each other, values side by side, settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparing.report import Figure, Page, Record, Section, Table, format_number, plots, print_table
from sparing.report.palette import ROLES

POSITIONS = ("step", "round")
"""Columns over which a table is a curve."""

QUANTITIES = ("loss", "accuracy", "nll", "train_loss", "error")
"""Columns that are drawn: the first that a table has."""

DIFFERENT, SAME = "What several runs measured", "Values that are equal in all runs"

ALONE = "One run of each: what chance alone would change is not known. Runs under several seeds tell."


def position_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The column over which rows are a curve; empty where there is none."""
    return next((name for name in POSITIONS if all(_number(row.get(name)) for row in rows)), "")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def page_of(record: Record, runs: Mapping[str, Record]) -> Page:
    """The page."""
    names = list(runs)
    roles = dict(zip(names, ROLES, strict=False))
    curves, ends = [], []
    for table in dict.fromkeys(table for one in runs.values() for table in one.tables):
        for figure, told in _curves(table, runs, roles):
            curves.append(figure)
            ends.append(told)
    # what was held out says more than what was trained on
    ends.sort(key=lambda told: not told.startswith("held out"))
    differing = record.table("settings")
    values = {title: _values(record, equal=equal) for title, equal in ((DIFFERENT, False), (SAME, True))}
    tables = [Table(rows, title, folded=title == SAME) for title, rows in values.items() if rows]
    which = ", ".join(f"`{row['setting']}`" for row in differing[:4])
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    count = f"{len(differing)} settings" if len(differing) > 1 else "one setting"
    answer = f"{len(runs)} runs differ in **{count}** ({which}{more})" if differing else "The settings are the same"
    sections = [
        *([Section("Curves", figures=curves)] if curves else []),
        *([Section("Values", tables=tables)] if tables else []),
        *([Section("Settings", tables=[Table(differing, "Settings that differ")])] if differing else []),
        Section("Runs", tables=[Table(record.table("runs"), "Runs", columns=_told(record))]),
    ]
    return Page(
        title=f"{' and '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}",
        question=record.question,
        answer=f"{answer}; {ends[0]}." if ends else f"{answer}.",
        sections=sections,
        record=record,
        # nothing was measured here: each run names its own
        reproduce={"machine": "", "seed": ""},
        caveats=list(_caveats(runs)),
    )


def _told(record: Record) -> list[str]:
    """Columns of the table of runs in which something stands."""
    rows = record.table("runs")
    return [name for name in rows[0] if any(row[name] is not None for row in rows)]


def _caveats(runs: Mapping[str, Record]) -> Iterator[str]:
    if all(isinstance(one.seed, int) for one in runs.values()):
        yield ALONE
    for key, what in (
        ("cpu", "processors"),
        ("cuda", "devices"),
        ("torch", "versions of torch"),
        ("commit", "commits"),
    ):
        if len({str(one.environment.get(key)) for one in runs.values()}) > 1:
            yield f"The runs were made with different {what}: times cannot be compared, and numbers may vary."
    if len({one.question for one in runs.values()}) > 1:
        yield "The runs answer different questions: equal words may stand for different things."


def _curves(table: str, runs: Mapping[str, Record], roles: Mapping[str, Any]) -> Iterator[tuple[Figure, str]]:
    """One picture of a table that is a curve in two runs or more, and the ends of its lines in words."""
    rows = {name: one.table(table) for name, one in runs.items()}
    rows = {name: found for name, found in rows.items() if len(found) > 1 and position_of(found)}
    if len(rows) < 2:
        return
    across = position_of([row for found in rows.values() for row in found])
    known = [name for name in QUANTITIES if all(any(_number(r.get(name)) for r in found) for found in rows.values())]
    units = {runs[name].units.get(known[0], "") for name in rows} if known else set()
    if not across or len(units) != 1:
        return
    up, unit = known[0], units.pop()
    series = [_series(name, found, across, up, roles[name]) for name, found in rows.items()]
    ends = ", ".join(f"{format_number(one.y[-1], unit)} ({one.label})" for one in series)
    what = up if up in table else f"{table} {up}"
    words = what.replace("_", " ")
    told = f"{words} ends at {ends}"
    caption = f"Table `{table}` of each record; where several rows have the same {across}, their mean."
    title = told[0].upper() + told[1:]
    yield plots.lines(series, title=title, x=across, y=plots.Axis(words, unit), caption=caption), told


def _series(name: str, rows: Sequence[Mapping[str, Any]], across: str, up: str, role: Any) -> plots.Series:
    at: dict[float, list[float]] = {}
    for row in rows:
        if _number(row.get(up)):
            at.setdefault(row[across], []).append(row[up])
    # as many points as a line of a page shows
    every = max(1, math.ceil(len(at) / 400))
    places = sorted(at)
    shown = sorted({*places[::every], places[-1]})
    return plots.Series(name, shown, [statistics.fmean(at[place]) for place in shown], role=role)


def _values(record: Record, *, equal: bool) -> list[dict[str, Any]]:
    """Values that are equal in all runs, or the others; as text, since each row has a unit of its own."""
    fixed = {"of", "row", "quantity", "unit"}
    found = []
    for row in record.table("values"):
        cells = {name: cell for name, cell in row.items() if name not in fixed}
        if (len(set(cells.values())) == 1) == equal:
            place = f"{row['of']}, {row['row']}" if row["row"] else str(row["of"])
            shown = {name: None if cell is None else format_number(cell, row["unit"]) for name, cell in cells.items()}
            found.append({"what": f"{place}: {row['quantity']}".replace("_", " "), **shown})
    return found


def print_tables(record: Record) -> None:
    """Print what differs and what was measured."""
    for rows, title in ((record.table("settings"), "Settings that differ"), (_values(record, equal=False), "Measured")):
        if rows:
            print_table(rows, title=title)
