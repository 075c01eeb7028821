"""The GPU benchmark's cells, and every kind of them on a CPU at tiny shapes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, astuple
from typing import Any

import pytest
import torch
from benchmarks.gpu import cells
from benchmarks.gpu import hypergrad as gpu

from sparing.report import Record

SMALL = list(gpu.cells(small=True))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr(gpu, "JUDGES", 1)
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))


def test_every_cell_is_a_row_of_its_own() -> None:
    every = list(gpu.cells(small=False))
    assert len(every) == len({astuple(cell) for cell in every}) == 7 + 4 * 7 + 6 * 7
    assert max(gpu.LIMITS.values()) < gpu.MINUTES
    # the dearest cell: one step of 512 directions, eight at once in 3.2 s, then nets of 10,000 steps of 6 ms
    longest = max(gpu.OUTER_SECONDS * 1.1, gpu.DIRECTIONS / gpu.CHUNK * 3.24)
    assert longest + gpu.JUDGES * max(gpu.JUDGE_STEPS.values()) * 0.006 + 30 < 60 * gpu.LIMITS["table"]
    assert {cell.kind for cell in SMALL} == set(gpu.LIMITS)


@pytest.mark.parametrize("cell", [cell for cell in SMALL if cell.kind != "table"], ids=lambda cell: str(astuple(cell)))
def test_a_hypergradient_is_timed_and_its_bytes_are_counted(cell: gpu.Cell) -> None:
    row = gpu.run(cell, small=True)
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert row["allocated"] > 0
    assert ("directions_a_second" in row) == (cell.kind == "directions")


@pytest.mark.parametrize("cell", [cell for cell in SMALL if cell.kind == "table"], ids=lambda cell: cell.method)
def test_a_cell_of_the_table_ends_with_an_accuracy(cell: gpu.Cell) -> None:
    row = gpu.run(cell, small=True)
    assert 0 <= row["lowest"] <= row["accuracy"] <= row["highest"] <= 100
    if cell.method != gpu.CONTROL:
        assert row["outer_steps"] == 1  # no seconds are left for more
        assert row["paper"] == gpu.PAPER["mnist", 1].get(cell.method)


def test_outer_steps_fill_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that takes more than half of them there is one; the pace is that of the second, without kernels."""
    (cell,) = (cell for cell in SMALL if cell.kind == "table" and cell.method == "reverse")
    for step, turns in ((120.0, 1), (100.0, 2), (40.0, 5), (90.0, 2)):
        times = iter([step, *[step] * 9])
        monkeypatch.setattr(gpu, "waited", lambda begin, times=times: next(times))
        monkeypatch.setattr(gpu, "TRY", dataclasses.replace(gpu.TRY, outer_seconds=200.0))
        assert gpu.run(cell, small=True)["outer_steps"] == turns


def test_a_cell_that_runs_past_its_time_is_a_row_and_the_next_call_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The processes are fake; a call begins no cell that might outlast it."""
    asked, clock = [], iter(range(0, 100_000, 100))

    def ran(_: str, words: list[str], **__: Any) -> cells.Done | None:
        cell = json.loads(words[words.index("--cell") + 1])
        asked.append(cell)
        if cell["method"] == "reverse":
            return None
        return cells.Done(1, "", "torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(cells, "launched", ran)
    monkeypatch.setattr(cells.time, "monotonic", lambda: float(next(clock)))
    record, out = Record(question="?", settings={}, seed=0), tmp_path / "rows.jsonl"
    # at 100, 200 and 300 s two of eight minutes are left for one more cell, at 400 s not
    assert gpu.fill(record, out, small=True, path=None, minutes=8) == len(SMALL) - 4
    record = Record.read(out)
    assert gpu.fill(record, out, small=True, path=None, minutes=1e6) == 0
    assert asked == [asdict(cell) for cell in SMALL]
    whys = {row["method"]: row["why"] for row in record.table("hypergrad")}
    assert whys["reverse"].startswith("ran past")
    assert whys["checkpointed"] == "out of memory"
