"""``sparing fetch``: list the known data sets and models, or bring one into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sparing.data import asset, catalogue, fetch
from sparing.errors import require
from sparing.report import Record, print_table

UNITS = {"download": "B", "size": "B"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """List the known data sets and models with licence and size, or fetch one into the cache."""

    name: Annotated[Positional[str], arg(metavar="NAME")] = ""
    """Name of the asset; without one the list is shown."""

    path: Path | None = None
    """An archive or folder you already have (file), to use; none: it is downloaded."""

    verify: bool = False
    """Check the sha256 of every cached file, not only the sizes."""


def run(settings: Settings) -> Record:
    """List, or fetch. Table "assets": one row per asset listed or fetched; sizes in bytes."""
    why, do = "it is a copy of one asset", "pass its NAME too"
    require(settings.path is None or bool(settings.name), "path", settings.path, why, do)
    record = Record(question="Which data sets and models are at hand?", settings=settings, seed=0, units=UNITS)
    found = {}
    if settings.name:
        asset(settings.name)
        found = {"location": str(fetch(settings.name, path=settings.path, verify=settings.verify))}
    for row in catalogue(verify=settings.verify and not settings.name):
        if settings.name in {"", row["name"]}:
            record.add("assets", **row, **found)
    return record


def show(record: Record) -> None:
    """Print the assets."""
    rows = record.table("assets")
    columns = ["name", "kind", "download", "size", "cached", "licence", "title"]
    if len(rows) == 1 and "location" in rows[0]:
        columns = ["name", "licence", "location"]
    print_table(rows, title="Data sets and models", units=record.units, columns=columns)
