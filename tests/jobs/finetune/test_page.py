"""The page: made of the record, answering with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparing.jobs.finetune.loop import UNITS
from sparing.jobs.finetune.page import answer, binned, blocks_section, memory_section, switch_map, write_page
from sparing.report import Record, plots


def a_record(method: str = "lisa", blocks: int = 3, measured: bool = True) -> Record:
    settings = {"method": method, "model": "small", "data": "notes.jsonl", "out": "out"}
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


def test_the_answer_has_its_numbers() -> None:
    text = answer(a_record())
    assert text.startswith(
        "Held-out loss falls from 5.12 to **2.38 nat/token** (perplexity 51.2 to 23.8) in 10 steps of LISA"
    )
    assert "**1.00 MiB** of tensors" in text


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
    assert "prediction is 0.1 % off" in memory_section(a_record()).figures[0].title
    assert "as predicted" in memory_section(a_record(measured=False)).figures[0].title


@pytest.mark.parametrize("blocks", [3, 40])
def test_many_blocks_are_a_curve(blocks: int) -> None:
    figure = blocks_section(a_record("full", blocks)).figures[0]
    assert figure.title.startswith(f"layers.{blocks - 1} moved most")
    assert figure.alt.startswith("Bars" if blocks == 3 else "Line plot")


def test_long_runs_are_binned() -> None:
    rows = [{"step": s, "loss": float(s)} for s in range(1, 1001)]
    steps, losses = binned(rows, "loss", points=10)
    assert steps == list(range(100, 1001, 100))
    assert losses == [100 * k + 50.5 for k in range(10)]
    assert binned(rows[:3], "loss")[1] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("method", ["full", "lisa", "lora"])
def test_the_page_is_one_file_with_everything(tmp_path: Path, method: str) -> None:
    page = write_page(a_record(method), tmp_path / "report.html", ["One seed."]).read_text(encoding="utf-8")
    for part in (
        "Loss",
        "Memory",
        "Blocks",
        "upon a time",
        "xx &lt;b&gt;",
        "One seed.",
        "2.38 nat/token",
        "1,234 tokens/s",
    ):
        assert part in page, part
    assert ("intervals" in page) == (method == "lisa")
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "<script" not in page
