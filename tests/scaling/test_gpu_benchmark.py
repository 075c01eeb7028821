"""The GPU benchmark's cells, and one of each kind that a CPU can run, at tiny shapes."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from benchmarks.gpu import scaling as gpu


def test_every_cell_is_a_row_of_its_own():
    every = list(gpu.cells(small=False))
    assert len(every) == len({astuple(cell) for cell in every}) == len(gpu.TOKENS) * 9 * 5 + 3 * 2


@pytest.mark.parametrize("arm", ["dense", "masked dense, blocks, 0.25"])
def test_a_layer_is_timed(monkeypatch, arm):
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu, "TIMED", 1)
    row = gpu.run(gpu.Cell(kind="linear", arm=arm, shape="q, o", tokens=8), small=True)
    assert 0 < row["least"] <= row["seconds"] <= row["most"]
    assert row["error"] == 0  # the same products
