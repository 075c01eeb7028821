"""Processes of a cell of a GPU part: how they end, and which may run side by side."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import agreement, cells

from sparing.report import Record


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str


# A part whose cells say what they are told.
PART = """
import json, os, sys, time
def main():
    name = json.loads(sys.argv[sys.argv.index("--cell") + 1])["name"]
    rank = int(os.environ.get("RANK", "0"))
    if name == "fails" and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        raise RuntimeError("CUDA error: what it was\\nCompile with more")
    if name == "late" or name == "fails" and rank < int(os.environ.get("WORLD_SIZE", "1")) - 1:
        time.sleep(600)
    print("a word of a library")
    print(json.dumps({"rank": rank, "world": os.environ.get("WORLD_SIZE", "none")}))
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of its own name, found through the path that the server takes over."""
    (tmp_path / "part_of_test.py").write_text(PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cells, "MODULE", "{}")
    return "part_of_test"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_cell_ends_with_its_row_or_says_why_not(part: str, ranks: int) -> None:
    row = cells.child(part, Cell(name="good"), seconds=60, ranks=ranks)
    assert row == {"rank": 0, "world": str(ranks) if ranks else "none"}
    assert cells.child(part, Cell(name="fails"), seconds=60, ranks=ranks) == {
        "why": "RuntimeError: CUDA error: what it was"
    }
    assert cells.child(part, Cell(name="late"), seconds=1.5, ranks=ranks) == {"why": "ran past 0.025 minutes"}


def test_cells_that_time_nothing_run_side_by_side_and_others_alone(tmp_path: Path) -> None:
    meet, alone = threading.Barrier(3), threading.Lock()

    def measure(cell: Cell, _: float) -> dict[str, Any]:
        if cell.name.startswith("b"):
            meet.wait(timeout=20)  # passes only where three are here at once
        else:
            assert alone.acquire(blocking=False)
            alone.release()
        return {"found": cell.name}

    names = ["b0", "b1", "b2", "t0", "t1"]
    record = Record(question="?", settings={}, seed=0)
    left = cells.fill(
        record, tmp_path / "rows.jsonl", "t", [Cell(name=name) for name in names], measure, minutes=8,
        limit=lambda _: 1.0, beside=lambda cell: 3 if cell.name.startswith("b") else 1,
    )  # fmt: skip
    assert left == 0
    assert [(row["name"], row["found"]) for row in record.table("t")] == [(name, name) for name in names]


def test_without_minutes_the_first_of_each_sort_runs(tmp_path: Path) -> None:
    record = Record(question="?", settings={}, seed=0)
    left = cells.fill(
        record, tmp_path / "rows.jsonl", "t", [Cell(name=name) for name in ("b0", "b1", "t0", "b2", "t1")],
        lambda cell, _: {"found": cell.name}, minutes=0, limit=lambda _: 1e9, sort=lambda cell: cell.name[0],
    )  # fmt: skip
    assert left == 3
    assert [row["found"] for row in record.table("t")] == ["b0", "t0"]


def test_numbers_of_two_devices_are_compared_in_float64() -> None:
    assert agreement.distance({"losses": [1.0, 3.0]}, {"losses": [1.0, 3.0 + 4e-12]}) == pytest.approx(1e-12, rel=1e-3)
    assert agreement.distance({"a": torch.ones(2)}, {"a": torch.tensor([1.0, float("nan")])}) == float("inf")
    with pytest.raises(ValueError, match="shapes"):
        agreement.distance({"a": [1.0]}, {"a": [1.0, 2.0]})
    with pytest.raises(ValueError, match="one device told"):
        agreement.distance({"a": 1.0}, {"b": 1.0})
