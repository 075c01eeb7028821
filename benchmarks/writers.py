"""Which runs wrote the rows of a result file that is filled over many runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEPT = ("commit", "cpu", "cores", "python", "torch", "numpy", "time")
"""What is kept of a run's environment; its time is that of its first row."""


def writers(path: Path, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs that wrote a file, this one last; of a file that has no list yet, the one that its head names.

    Args:
        path: The result file, which need not be there yet.
        environment: Of this run, as ``sparing.report.environment`` gives it.
    """
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known: list[dict[str, Any]] = document.get("writers", [])
    if not known and "environment" in document:
        known = [_short(document["environment"])]
    mine = _short(environment)
    same = {**known[-1], "time": None} == {**mine, "time": None} if known else False
    return known if same else [*known, mine]


def _short(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: environment[name] for name in KEPT if name in environment}
