"""Rows of a measurement, kept as they come, so that the same command goes on after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.writers import this_run, writers
from sparing.report.atomic import write_whole

RESULTS = Path(__file__).parents[1] / "results"


class Store:
    """A JSON file with one row per measurement, by key."""

    def __init__(self, part: str, *, anew: bool = False) -> None:
        """Open ``valley_<part>.json`` with the rows it has, or without."""
        self.path = RESULTS / f"valley_{part}.json"
        self.command = f"python -m benchmarks.valley --only {part}"
        if anew:
            self.path.unlink(missing_ok=True)
        self.rows = self._read()

    def once(self, key: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Measure a row unless it is there, and write the file; several processes may fill one file."""
        if key not in self.rows:
            self.rows |= self._read()
        if key not in self.rows:
            row = _plain(dict(measure()))
            with _alone(self.path):
                self.rows = self._read() | {key: row}
                about = this_run() | {"command": self.command}
                head = {"command": self.command, "environment": about, "writers": writers(self.path, about)}
                document = head | {"rows": self.rows}
                write_whole(self.path, json.dumps(document, indent=0, allow_nan=False) + "\n")
            print(key, {name: value for name, value in row.items() if not isinstance(value, list | dict)}, flush=True)
        return self.rows[key]

    def _read(self) -> dict[str, dict[str, Any]]:
        text = self.path.read_text() if self.path.exists() else "{}"
        found: dict[str, dict[str, Any]] = json.loads(text).get("rows", {})
        return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that belongs to a file."""
    with (Path(tempfile.gettempdir()) / f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _plain(value: Any) -> Any:
    """Six digits of every number; what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
