"""What chapters share: going on with the same settings on the same data or not at all, and rows taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparing.errors import require
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import RECORD, Folder
from sparing.report import Record


def open_record(fresh: Record, place: Folder) -> Record:
    """The record that a demo adds to: the one that is there, if its settings are these, or the fresh one."""
    path = place.at(RECORD)
    if not path.exists():
        place.check_same(fresh.settings)
    elif place.resume:
        there = Record.read(path)
        known = {name: there.settings.get(name) for name in fresh.settings}
        do = "pass the settings it began with, another --out, or --overwrite in place of --resume to start over"
        why = f"the demo in {path.parent.name} began with {_listed(known)}"
        require(known == fresh.settings, "resume", _listed(fresh.settings), why, do)
        place.check_same(fresh.settings)
        return there
    place.claim_(fresh.settings)
    with refusing_to_write("out", place.path):
        fresh.write(path)
    return fresh


def copy_tables(record: Record, found: Record, names: Mapping[str, str], **columns: Any) -> None:
    """Copy rows of a run's own record to the demo's, by table -> table there, with more columns in front."""
    for name, theirs in names.items():
        for row in found.table(name):
            record.add(theirs, **columns, **row)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def require_unchanged(record: Record, table: str, found: str, *, column: str = "name") -> None:
    """Refuse to go on with other data than a chapter started on, as where a download fails now that worked then."""
    for row in record.table(table)[:1]:
        why = f"the chapter began on {row[column]}, which is not available now"
        do = "make it available again, or pass --overwrite in place of --resume to start over"
        require(row[column] == found, "resume", found, why, do)
