"""Read the records, line them up, and write the page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparing.jobs import run_file
from sparing.jobs.compare import page
from sparing.jobs.compare.settings import Settings
from sparing.jobs.folder import RECORD, Folder, identity, print_page_path
from sparing.report import Record, environment
from sparing.report.atomic import write_whole

COLUMNS = {"table", "setting", "of", "row", "quantity", "unit", "run"}
"""Names of columns beside those of the runs."""

LEFT_OUT = {"out", "overwrite", "resume", "kind", "save_every"}
"""Settings in which two runs differ without being different."""


def run(settings: Settings) -> Record:
    """Compare records: tables "runs", "settings" (where they differ), "values" (what several measured)."""
    files = [path / RECORD if path.is_dir() else path for path in settings.runs]
    folder = Folder(settings.out, overwrite=settings.overwrite, reads=tuple(files), resumes=False)
    folder.check()
    runs = dict(zip(labels(files), map(Record.read, files), strict=True))
    record = Record(
        question=f"In what do {len(runs)} runs differ, in settings and in what was measured?",
        settings=settings,
        seed=0,
        environment=environment(device=False),
    )
    for name, one in runs.items():
        known = {key: one.environment.get(key) for key in ("commit", "cpu", "torch", "time", "command")}
        seeds = " ".join(map(str, one.seed)) if isinstance(one.seed, list) else str(one.seed)
        told = {key: str(value) if value else None for key, value in known.items()}
        record.add("runs", run=name, question=one.question, seeds=seeds, rows=len(one.rows), **told)
    for row in differing(runs):
        record.add("settings", **row)
    for row in side_by_side(runs):
        record.add("values", **row)
    folder.claim_(identity(settings))
    write_whole(folder.at(run_file.FILE), run_file.text_of(settings))
    folder.finish_(record, lambda record, path: page.page_of(record, runs).write(path))
    return record


def show(record: Record) -> None:
    """Print the settings that differ, the values, and where the page is."""
    page.print_tables(record)
    print_page_path(record)


def labels(files: Sequence[Path]) -> list[str]:
    """A name for each run: the folder of its record, with those above it as far as it takes to tell them apart."""
    # by their names: a link that leads to itself cannot be followed
    whole = [Path(os.path.abspath(path)) for path in files]  # noqa: PTH100
    places = [path.parent if path.name == RECORD else path for path in whole]
    found = [place.name for place in places]
    for depth in range(2, 1 + max(len(place.parts) for place in places)):
        counts = Counter(found)
        found = [
            name if counts[name] == 1 else "/".join(place.parts[-depth:])
            for name, place in zip(found, places, strict=True)
        ]
    return [f"run {name}" if name in COLUMNS else name for name in found]


def differing(runs: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """A row for each setting in which runs differ."""
    flat = {name: dict(_flat(one.settings)) for name, one in runs.items()}
    for key in dict.fromkeys(key for known in flat.values() for key in known):
        cells = {name: known.get(key) for name, known in flat.items()}
        if len(set(cells.values())) > 1:
            yield {"setting": key, **cells}


def _flat(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if key in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{key}.")
        else:
            several = isinstance(value, list)
            yield within + key, " ".join(map(str, value)) if several else "none" if value is None else str(value)


def side_by_side(runs: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """A row for each number that two or more runs have, of tables that are no curves.

    Rows are the same where their texts are; a table with two rows of the same texts is not lined up.
    """
    keyed = {name: {table: _by_key(one.table(table)) for table in one.tables} for name, one in runs.items()}
    for table in dict.fromkeys(table for one in runs.values() for table in one.tables):
        known = {name: tables[table] for name, tables in keyed.items() if tables.get(table)}
        if len(known) < 2:
            continue
        for key in dict.fromkeys(key for rows in known.values() for key in rows):
            columns = dict.fromkeys(column for rows in known.values() for column in rows.get(key, {}))
            for column in columns:
                cells = {name: rows.get(key, {}).get(column) for name, rows in known.items()}
                if sum(cell is not None for cell in cells.values()) > 1:
                    unit = next((runs[name].units[column] for name in known if column in runs[name].units), "")
                    yield {"of": table, "row": key, "quantity": column, "unit": unit, **cells}


def _by_key(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Numbers of each row by its texts; nothing where the texts do not tell rows apart, or where they are a curve."""
    if len(rows) > 1 and page.position_of(rows):
        return {}
    found = {}
    for row in rows:
        key = ", ".join(str(cell) for cell in row.values() if isinstance(cell, str))
        numbers = {
            name: cell for name, cell in row.items() if isinstance(cell, int | float) and not isinstance(cell, bool)
        }
        if len(key) > 80 or key in found:
            return {}
        found[key] = numbers
    return found
