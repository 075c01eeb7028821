"""Which runs wrote the rows of a result file that is filled over many runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparing.report import environment

KEPT = ("command", "commit", "cpu", "cores", "threads", "cuda", "python", "torch", "numpy", "transformers", "time")
"""What is kept of a run's environment; its time is that of its first row."""


@functools.cache
def this_run() -> dict[str, Any]:
    """Environment of this process, asked once: a commit made later is not the code that runs."""
    return environment()


def writers(path: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs that wrote a file, a new one last; of a file that has no list yet, what its head says of the last.

    Args:
        path: The result file, which need not be there yet.
        run: Environment of this run.
    """
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known: list[dict[str, Any]] = document.get("writers", [])
    if not known and "environment" in document:
        known = [_short(document["environment"]) | {"note": "the last run before this list began"}]
    mine = _short(run)
    return known if any(_kind(one) == _kind(mine) for one in known) else [*known, mine]


def _short(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in KEPT if name in run}


def _kind(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in {"time", "note"}}
