"""The page: made of the record, answering with its numbers."""

from __future__ import annotations

import pytest

from snapshots import check_page
from sparing.jobs.finetune.loop import UNITS
from sparing.jobs.finetune.page import PAGE, answer, memory_figure, movement_figure, switch_map
from sparing.report import Record, plots
from sparing.report.series import bin_means


def a_record(method: str = "lisa", blocks: int = 3, measured: bool = True) -> Record:
    settings = {"method": method, "model": "small", "data": ["notes.jsonl"], "out": "out"}
    record = Record(question="What changes?", settings=settings, seed=0, units=dict(UNITS), environment={})
    for step in range(1, 11):
        record.add("train", step=step, tokens=8, loss=5.0 - step / 4, lr=0.1, grad_norm=1.0, seconds=float(step))
    for step, loss in ((0, 5.125), (10, 2.375)):
        record.add("held_out", step=step, loss=loss, perplexity=10 * loss, tokens=100, seconds=0.0)
    for interval, drawn in enumerate(("0 2", "1 2") if method == "lisa" else ()):
        record.add("switches", interval=interval, step=1 + 6 * interval, blocks=drawn)
    for category, size in (("params", 2**20), ("total", 2**20)):
        record.add("memory", category=category, predicted=size, measured=size + 2**10 if measured else None)
    for index in range(blocks):
        record.add("movement", block=f"layers.{index}", role="body", index=index, moved=(index + 1) / 8)
    record.add("samples", prompt="Once", before="xx <b>", after="upon a time")
    record.add("speed", method="LayerSampling", tokens_per_second=1234.0, step_seconds=0.5)
    return record


def test_snapshot() -> None:
    check_page(PAGE.of(a_record(), ["One seed."]), __file__)


@pytest.mark.parametrize(("lacking", "title"), [({"movement", "switches"}, "Blocks"), ({"memory"}, "Memory")])
def test_a_chapter_without_rows_is_not_on_the_page(lacking: set[str], title: str) -> None:
    record = a_record()
    record.rows[:] = [row for row in record.rows if row["table"] not in lacking]
    assert title not in [section.title for section in PAGE.of(record).sections]


def test_without_held_out_rows_it_says_training() -> None:
    record = a_record()
    record.rows[:] = [row for row in record.rows if row["table"] not in {"held_out", "memory"}]
    assert answer(record) == "Training loss falls from 4.75 to **2.50 nat/token** in 10 steps of LISA."


def test_a_loss_that_rises_is_said_to_rise() -> None:
    record = a_record()
    record.add("held_out", step=11, loss=9.0, perplexity=1.0, tokens=1, seconds=1.0)
    assert "rises from 5.12" in answer(record)


def test_the_map_of_switches_has_the_edges_of_the_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 0 and 2 in steps 1 to 6, blocks 1 and 2 in steps 7 to 10."""
    drawn = {}
    monkeypatch.setattr(plots, "heatmap", lambda values, **how: drawn.update(how, values=values))
    switch_map(a_record())
    assert drawn["values"] == [[1, 0], [0, 1], [1, 1]]
    assert drawn["x_edges"] == [0, 6, 10]
    assert drawn["title"] == "3 of 3 middle blocks trained in 2 intervals"
    assert switch_map(a_record("full")) is None


def test_memory_says_how_far_the_prediction_was_off() -> None:
    assert "prediction is 0.1 % off" in memory_figure(a_record()).title
    assert "as predicted" in memory_figure(a_record(measured=False)).title


@pytest.mark.parametrize("blocks", [3, 40])
def test_many_blocks_are_a_curve(blocks: int) -> None:
    figure = movement_figure(a_record("full", blocks))
    assert figure.alt.startswith("Bars" if blocks == 3 else "Line plot")


def test_long_runs_are_binned() -> None:
    rows = [{"step": s, "loss": float(s)} for s in range(1, 1001)]
    steps, losses = bin_means(rows, "loss", points=10)
    assert steps == list(range(100, 1001, 100))
    assert losses == [100 * k + 50.5 for k in range(10)]
    assert bin_means(rows[:3], "loss")[1] == [1.0, 2.0, 3.0]
