"""What every part does with its cells: each in processes of its own, as many as the minutes hold, a row after each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparing.report import Record


def child(part: str, cell: Any, *, seconds: float, options: Sequence[str] = (), ranks: int = 0) -> dict[str, Any]:
    """Run a cell of a part as a program, of some ranks or of none; one that fails, or takes longer, says ``why``."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    command = [sys.executable, "-m", *launch, f"benchmarks.gpu.{part}", "--cell", json.dumps(asdict(cell)), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"why": f"ran past {seconds / 60:g} minutes"}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and found:
        return dict(json.loads(found[-1]))
    lines = done.stderr.strip().splitlines()
    # the last line of a launcher of ranks is its own, not the error's
    said = [line for line in lines if "Error" in line] or lines or [f"ended with {done.returncode}"]
    return {"why": "out of memory" if "out of memory" in done.stderr else said[-1].strip()[:200]}


def fill(
    record: Record, out: Path, table: str, cells: Sequence[Any], measure: Callable[[Any, float], dict[str, Any]], *,
    minutes: float, limit: Callable[[Any], float], after: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Measure what is left, as far as the minutes go, and write after every cell.

    Args:
        record: Rows of the part.
        out: Where it goes.
        table: Of the record: a row for each cell.
        cells: All of the part, in order; dataclasses.
        measure: Row of a cell within so many seconds.
        minutes: For all; at least one cell, whatever the minutes.
        limit: Seconds that a cell may take; none begins that might outlast the minutes.
        after: What to make of the rows after each cell.

    Returns:
        How many cells are left.
    """
    done = record.table(table)
    left = [cell for cell in cells if not any(asdict(cell).items() <= row.items() for row in done)]
    begin = time.monotonic()
    for at, cell in enumerate(left):
        if at and time.monotonic() - begin > 60 * minutes - limit(cell):
            return len(left) - at
        record.add(table, **asdict(cell), **measure(cell, limit(cell)))
        after()
        record.write(out)
    return 0


def resumed(record: Record, out: Path) -> Record:
    """The record with the rows that an earlier call left."""
    if out.exists():
        record.rows = Record.read(out).rows
    return record


def say(left: int) -> None:
    """Tell whether to run the part again, as ``benchmarks.gpu`` reads it."""
    sys.stdout.write(f"{left} cells are left: run it again\n" if left else "nothing is left\n")
