"""Rows of a study in one JSON file that several workers fill, and the claims by which they share the work."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks import onednn
from benchmarks.layers.texts import layers_folder
from benchmarks.writers import this_run, writers
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parents[1] / "results" / "layers.json"
COMMAND = "python -m benchmarks.layers.study"
PAUSE = 5.0
"""Seconds between looks where all that is left is at work elsewhere."""

Row = dict[str, Any]
Rows = Mapping[str, Row]


class Job(Protocol):
    """Something that makes one row."""

    @property
    def key(self) -> str:
        """Name of the row."""
        ...


class Store:
    """A JSON file with one row per key."""

    def __init__(self, path: Path = RESULT, *, command: str = COMMAND, folder: Path | None = None) -> None:
        """Take the file, which need not be there yet, the command that fills it, and where claims are kept."""
        self.path, self.command = path, command
        self._locks = (layers_folder() if folder is None else folder) / "claims"

    def rows(self) -> dict[str, Row]:
        """What is there."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else "{}"
        found: dict[str, Row] = json.loads(text).get("rows", {})
        return found

    def put(self, key: str, row: Row) -> None:
        """Add a row."""
        with self._locked("file", wait=True):
            rows = self.rows() | {key: row}
            about = this_run() | {"command": self.command}
            head = {"command": self.command, "environment": about, "writers": writers(self.path, about)}
            write_whole(self.path, json.dumps(head | {"rows": rows}, indent=0, allow_nan=False) + "\n")

    @contextlib.contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Take a row to make it; False if it is there, or another worker is at it.

        A claim dies with its process, so what a killed worker was at is taken up by the next.
        """
        with self._locked(key, wait=False) as mine:
            yield mine and key not in self.rows()

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool) -> Iterator[bool]:
        self._locks.mkdir(parents=True, exist_ok=True)
        words = f"{self.path.resolve()}\n{name}"
        with (self._locks / hashlib.sha256(words.encode()).hexdigest()[:24]).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


J = TypeVar("J", bound=Job)


def work(
    store: Store,
    plan: Callable[[Rows], Sequence[J]],
    measure: Callable[[J], Row],
    told: Callable[[Rows], None] = lambda rows: None,
) -> None:
    """Do what a plan asks for, given what is there, until it asks for nothing; any number of workers may."""
    while todo := plan(store.rows()):
        for job in todo:
            with store.claimed(job.key) as mine:
                if mine:
                    store.put(job.key, measure(job) | onednn.mark())
                    break
        else:
            time.sleep(PAUSE)
        told(store.rows())
