"""The page says in words and numbers what the record holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from snapshots import check_page
from sparing.jobs.pretrain import Pretrain, job
from sparing.jobs.pretrain.inputs import Inputs
from sparing.jobs.pretrain.page import PAGE, by_kind, loss_figure, masks_text, shorten_rates, sparsity
from sparing.report import Record


@pytest.fixture
def record() -> Record:
    """Of six steps under masks that grow; written by a run."""
    return Record.read(Path(__file__).with_name("record.jsonl"))


def test_snapshot(record: Record):
    check_page(PAGE.of(record, ["One seed."]), __file__)


def test_a_loss_that_rises_is_named(record: Record):
    record.rows.append({"table": "held_out", "step": 7, "loss": 99.0, "seconds": 1.0})
    assert "then rises" in loss_figure(record).title


def test_a_dense_run_has_no_masks(record: Record):
    record.rows[:] = [row for row in record.rows if row["table"] not in {"layers", "density"}]
    assert sparsity(record) == "all of its weights"
    assert "Sparsity" not in [section.title for section in PAGE.of(record).sections]


def test_masks_that_were_exchanged_are_counted(record: Record):
    for row in record.rows:
        row |= {"density": 0.5} if row["table"] == "density" else {}
    assert "Masks were exchanged 1 times, the number of live weights stayed." in masks_text(record)


def test_masks_that_follow_magnitude_have_a_caveat(settings: Pretrain, inputs: Inputs):
    assert any("No rule is known" in note for note in job._caveats(replace(settings, dynamic="gmp"), inputs))


def test_rows_of_a_kind_are_one(record: Record):
    rates, layers = record.table("rates"), record.table("layers")
    short = shorten_rates(rates)
    assert [row["weights"] for row in short][-2:] == ["lm_head", "norms and biases (5)"]
    assert sum(row["parameters"] for row in short[:-1]) + 5 * 16 == record.table("cost")[0]["measured"]
    masks = by_kind(layers)
    assert (len(masks), len(layers)) == (7, 14)
    assert sum(row["live"] for row in masks) == sum(row["live"] for row in layers)
    assert masks[0]["density"] == pytest.approx(0.5, abs=0.01)
