"""The GPU benchmark's cells, and its arms on a CPU with tiny nets."""

from __future__ import annotations

import json
import sys
from dataclasses import astuple

import pytest
import torch
from benchmarks.gpu import cells
from benchmarks.gpu import federated as gpu

from sparing.report import Record


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu, "ROUNDS", 3)
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu.batched, "why_not_layered", gpu.batched.why_not_layered)  # the vmap arm puts another there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(gpu.PFL, raising=False)


def test_every_cell_is_a_row_of_its_own():
    every = list(gpu.cells(small=False))
    assert len(every) == len({astuple(cell) for cell in every}) == 3 * (3 + 5 + 5) + 1


@pytest.mark.parametrize("arm", ["stacked", "host rows", "loop", "vmap"])
def test_rounds_are_timed(arm):
    """Float32, a few steps: sums in another order differ by 1e-7 each, which batch norm of few rows enlarges."""
    row = gpu.run(gpu.Cell(arm=arm, net="CNN, 32 × 32" if arm == "vmap" else "ResNet, narrow", cohort=2), small=True)
    assert 0 < row["least"] <= row["per_second"] <= row["most"]
    assert row.get("error", 0.0) < 1e-4


def test_whole_runs_are_compared_with_the_cpus(monkeypatch):
    """On the CPU they are the same run twice; a device whose sums go wrong is found and named."""
    monkeypatch.setattr(gpu, "METHODS", {"FedAvg": gpu.FedAvg(), "median": gpu.FedAvg(combine=gpu.Median())})
    # pickle sends its functions to processes by name, and other tests import the module anew
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    cell = gpu.Cell(arm="simulate", net="CNN, 32 × 32", cohort=3)
    assert gpu.run(cell, small=True) == {"error": 0.0, "worst": "FedAvg", "runs": 4}
    real, calls = gpu.simulate, []

    def wrong(make, clients, method, plan, **options):
        calls.append(make.args[1])
        run = real(make, clients, method, plan, **options)
        if len(calls) == 4:  # the median's on the device
            run.params["0.weight"] += 1.0
        return run

    monkeypatch.setattr(gpu, "simulate", wrong)
    row = gpu.run(cell, small=True)
    assert row["worst"] == "median"
    assert row["error"] > 0.1


def test_without_an_interpreter_pfl_is_a_row_that_says_so():
    row = gpu.run(gpu.Cell(arm="pfl", net="CNN, 32 × 32", cohort=2), small=True)
    assert row == {"why": "SPARING_PFL names no interpreter"}


def test_a_call_stops_in_time_and_the_next_goes_on(monkeypatch, tmp_path):
    """The processes are fake."""
    asked, clock = [], iter(range(0, 10_000, 100))
    speeds = {"stacked": 6.0, "host rows": 4.0, "loop": 2.0}

    def ran(_, words, **__):
        cell = json.loads(words[words.index("--cell") + 1])
        asked.append(cell)
        if cell["arm"] == "vmap":
            return None
        if cell["arm"] == "pfl":
            return cells.Done(1, "", "torch.OutOfMemoryError: CUDA out of memory")
        if cell["arm"] == "simulate":
            return cells.Done(0, json.dumps({"error": 0.0}), "")
        return cells.Done(0, json.dumps({"per_second": speeds[cell["arm"]]}), "")

    monkeypatch.setattr(cells, "launched", ran)
    monkeypatch.setattr(cells.time, "monotonic", lambda: float(next(clock)))
    record, out = Record(question="?", settings={}, seed=0), tmp_path / "rows.jsonl"
    assert gpu.fill(record, out, small=True, minutes=8, cell_minutes=4) == 9 - 3  # as in benchmarks.gpu.scaling
    assert gpu.fill(record := Record.read(out), out, small=True, minutes=1e6, cell_minutes=4) == 0
    assert len(asked) == 9
    assert {row["arm"]: row.get("why") for row in record.table("federated")} == {
        "simulate": None, "stacked": None, "host rows": None, "loop": None, "vmap": "ran past 4 minutes",
        "pfl": "out of memory",
    }  # fmt: skip
    assert [(row["against"], row["times"]) for row in record.table("gains")] == 2 * [
        ("host rows", 1.5), ("loop", 3.0),
    ]  # fmt: skip
