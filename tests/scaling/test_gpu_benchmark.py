"""The GPU benchmark's cells, and every kind of them on a CPU at tiny shapes; what only a GPU runs is refused."""

from __future__ import annotations

import inspect
import json
from dataclasses import astuple

import pytest
import torch
from benchmarks.gpu import cells
from benchmarks.gpu import scaling as gpu

from sparing.errors import UserError
from sparing.report import Record
from sparing.scaling import coordinate_check
from sparing.scaling.check.slopes import slopes
from sparing.seeds import stream

SEEDS, CPU = (0, 1), torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu, "TIMED", 1)
    monkeypatch.setattr(gpu, "REPEATS", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_cell_is_a_row_of_its_own():
    every = list(gpu.cells(small=False))
    assert len(every) == len({astuple(cell) for cell in every}) == len(gpu.TOKENS) * 9 * 5 + 4 * 3 * 2
    # fewer seeds say nothing of scatter, and slopes of one are taken at their word
    assert len(gpu.SEEDS) == 3
    assert inspect.signature(coordinate_check).parameters["limit"].default == gpu.LIMIT


@pytest.mark.parametrize("arm", ["dense", "masked dense, 2:4", "masked dense, blocks, 0.25"])
@pytest.mark.parametrize("kind", ["linear", "blocks"])
def test_a_step_is_timed(kind, arm):
    row = gpu.run(gpu.Cell(kind=kind, arm=arm, shape="q, o", tokens=8), small=True)
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert row["error"] == 0  # the same products


@pytest.mark.parametrize("arm", ["2:4", "blocks, 0.5"])
def test_what_only_a_gpu_runs_is_refused_in_a_line(arm):
    with pytest.raises(UserError, match="these kernels are CUDA's"):
        gpu.run(gpu.Cell(kind="linear", arm=arm, shape="q, o", tokens=8), small=True)


def test_widths_one_by_one_make_the_verdict_of_a_check_of_all(monkeypatch):
    monkeypatch.setattr(gpu, "SEEDS", SEEDS)
    monkeypatch.setattr(gpu, "TRY_DENSITIES", (0.25,))
    rows = []
    for width in gpu.TRY_WIDTHS:
        for seed in SEEDS:
            assert not list(gpu.verdicts(rows, gpu.TRY_WIDTHS))  # not before every width has every seed
            found = json.loads(
                json.dumps(gpu.run(gpu.Cell(kind="width", arm="SP", width=width, seed=seed), small=True))
            )
            rows += [{"rule": "SP"} | layer for layer in found["layers"]]
    (verdict,) = gpu.verdicts(rows, gpu.TRY_WIDTHS)
    # seeds have batches of their own here: one check takes one batch, so that it is made for each seed
    whole = [row for seed in SEEDS for row in checked(seed).rows]
    expected = slopes(whole, limit=0.05, loose=0.1)
    assert verdict["judged"] == sum(one.limit is not None for one in expected)
    assert verdict["beyond"] == sum(not one.passed for one in expected)
    assert (verdict["rule"], verdict["seeds"]) == ("SP", 2)


def checked(seed: int):
    ids = torch.randint(256, (2, 32), generator=stream(seed, "gpu width"))
    return coordinate_check(
        lambda d: gpu.llama(d, layers=1, heads=d // 64, inner=2 * d), gpu.TRY_WIDTHS, (0.25,), rule=gpu.SP(),
        seeds=(seed,), batch={"input_ids": ids, "labels": ids}, steps=3,
    )  # fmt: skip


def test_a_cell_that_runs_past_its_time_is_a_row_and_the_next_goes_on(monkeypatch, tmp_path):
    """The processes are fake; a call begins no cell that might outlast it, and the next call goes on."""
    asked, clock = [], iter(range(0, 10_000, 100))

    def ran(_, words, **__):
        cell = json.loads(words[words.index("--cell") + 1])
        asked.append(cell)
        if cell["arm"] == "2:4":
            return None
        if cell["arm"] == "dense":
            return cells.Done(0, '{"seconds": 1.0}\n', "")
        return cells.Done(1, "", "torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(cells, "launched", ran)
    monkeypatch.setattr(cells.time, "monotonic", lambda: float(next(clock)))
    record = Record(question="?", settings={}, seed=0)
    every, out = len(list(gpu.cells(small=True))), tmp_path / "rows.jsonl"
    left = gpu.fill(record, out, small=True, minutes=8, cell_minutes=4)
    assert left == every - 3  # at 100 and 200 s four minutes are left for one more, at 300 s not
    left = gpu.fill(record := Record.read(out), out, small=True, minutes=1e6, cell_minutes=4)
    assert left == 0
    assert [{k: v for k, v in cell.items() if k in asked[0]} for cell in record.table("scaling")] == asked
    whys = {row["arm"]: row.get("why") for row in record.table("scaling")}
    assert (whys["2:4"], whys["dense"], whys["SuPar"]) == ("ran past 4 minutes", None, "out of memory")
