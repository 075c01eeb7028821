"""The page says what the suites hold."""

from __future__ import annotations

import json
from pathlib import Path

from idioms import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "trust_idioms.json"


def test_the_committed_counts_are_those_of_the_suites() -> None:
    """Else: ``python -m benchmarks.trust --only idioms`` after deleting the row, and ``make results``."""
    rows = json.loads(RESULTS.read_text())["rows"]
    assert sorted(rows) == sorted(table.ROOMS)
    for room, row in rows.items():
        counts = table.counted(table.cells(room))
        assert {name: row[name] for name in counts} == counts, room
