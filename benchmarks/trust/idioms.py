"""What users do with each part of the library: the suites of ``tests/idioms``, run, and their cells counted.

A cell is one idiom on one subject. Its test holds that it is equal to an independent answer, or refused in a line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust.store import Store
from sparing.report.environment import commit

ROOT = Path(__file__).parents[2]


def run(jobs: Sequence[str], share: int, of: int) -> None:
    """Run every suite, whatever the jobs: a row each."""
    sys.path.insert(0, str(ROOT / "tests"))
    from idioms import table

    rows = Store("idioms")
    for room in table.ROOMS[share::of]:
        rows.once(room, lambda room=room: suite(room, table.counted(table.cells(room))))


def suite(room: str, counts: dict[str, int]) -> dict[str, Any]:
    """Run the tests of a suite in an interpreter of their own; a row."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"tests/idioms/{room}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{room}: {done.stdout[-2000:]}{done.stderr[-500:]}")
    said = done.stdout.strip().splitlines()[-1].partition(" in ")[0].strip("= ")
    return {"room": room, **counts, "tests": said, "commit": commit()}
