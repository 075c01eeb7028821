"""The GPU benchmark's cells, and one of each kind on the CPU, at tiny shapes and as a call starts them."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple

import pytest
from benchmarks.gpu import sharding as gpu

from oracles.processes import answers
from sparing.sharding import effective


def test_every_cell_is_a_row_of_its_own() -> None:
    every = list(gpu.cells())
    assert len(every) == len({astuple(cell) for cell in every}) == 6 + 2 * len(effective()) + 3 * 6 + 2 * 4 * 6 + 2


def test_numbers_come_back_within_the_bound() -> None:
    for bits in (8, 4):
        row = gpu.run(gpu.Cell(kind="kernel", bits=bits), small=True)
        assert 0 < row["error"] <= row["bound"]


def test_the_share_behind_arithmetic_is_that_of_the_other_streams() -> None:
    work = [{"cat": "kernel", "args": {"stream": 7}, "ts": ts, "dur": 10.0} for ts in (0.0, 20.0)]
    wires = [{"cat": "gpu_memcpy", "args": {"stream": 13}, "ts": ts, "dur": 4.0} for ts in (8.0, 22.0)]
    found = gpu.behind([*work, *wires, {"cat": "cpu_op", "ts": 0.0, "dur": 99.0}])
    assert found == {"streams": 2, "arithmetic": 20e-6, "others": 8e-6, "share behind": 0.75}


def small_cells() -> list[dict[str, object]]:
    """Of two ranks."""
    kinds = [("bits", None), ("bits", "cpu"), ("memory", None), ("overlap", None)]
    return [gpu.run(gpu.Cell(kind=kind, plan="IIG", world=2, offload=home), small=True) for kind, home in kinds]


@pytest.mark.processes
@pytest.mark.slow  # two processes
def test_cells_of_two_ranks() -> None:
    """Here the device is the processor: nothing differs, and no allocator tells what is held."""
    for plain, offloaded, memory, overlap in answers(2, small_cells):
        assert plain == offloaded == {"equal": True, "apart": 0.0}
        assert memory["held"] is None
        assert memory["formula"] > 0
        assert overlap["seconds"] > 0
        assert overlap["share behind"] is None


def test_a_call_keeps_rows_and_goes_on(tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """Cells that fail or are late are rows that say why."""
    asked: list[gpu.Cell] = []
    fake = lambda part, cell, *, options, **_: asked.append(cell) or {"why": f"not done, {part} {options}"}  # noqa: E731
    monkeypatch.setattr(gpu, "child", fake)
    monkeypatch.setattr(sys, "argv", ["sharding", "--try", "--kinds", "kernel", "--out", str(tmp_path / "rows.jsonl")])
    gpu.main()
    gpu.main()
    assert [cell.bits for cell in asked] == [8, 4]
    assert capsys.readouterr().out == "nothing is left\n" * 2
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["why"] for line in lines if line.get("table") == "sharding"] == ["not done, sharding ['--try']"] * 2
