"""The tables of the plan and of the masks agree with plan, optimizer and masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparing.jobs.pretrain.state import TrainState
from sparing.jobs.pretrain.tables import note_layers, note_plan
from sparing.report import Record
from sparing.scaling.entries import layer_pattern


@pytest.fixture
def record() -> Record:
    return Record(question="?", settings={}, seed=0)


def test_layers_of_a_kind_share_a_row(started: Callable[..., TrainState], record: Record):
    state = started(width=32, density=0.25, lr=0.01, weight_decay=0.2)
    note_plan(state, record)
    rows = {row["weights"]: row for row in record.table("rates")}
    assert len(record.table("plan")) == len(state.plan.entries) == 21
    assert sum(row["layers"] for row in rows.values()) == 21
    assert sum(row["parameters"] for row in rows.values()) == sum(p.numel() for p in state.model.parameters())
    up = rows["model.layers.*.mlp.up_proj.weight"]
    # four times the base's width at a quarter of its density: the rate of the base, and its decay per step
    assert up == up | {"layers": 2, "density": 0.25, "factor": 1.0, "peak_rate": 0.01}
    assert up["decay_per_step"] == pytest.approx(0.002)
    assert rows["model.norm.weight"]["decay_per_step"] == 0.0
    assert rows["model.embed_tokens.weight"]["factor"] == 1.0


def test_masks_by_layer(started: Callable[..., TrainState], record: Record):
    state = started(masks="bernoulli", backend="csr")
    note_layers(state, record)
    rows = record.table("layers")
    assert [row["weight"] for row in rows] == list(state.masks)
    assert {row["backend"] for row in rows} == {"csr"}
    assert sum(row["live"] for row in rows) == sum(int(mask.sum()) for mask in state.masks.values())
    assert {
        name: (r["dead_neurons"], r["unread_inputs"]) for r in rows if (name := r["weight"]) in state.masks.dead
    } == (state.masks.dead)


def test_a_dense_model_has_no_masks(started: Callable[..., TrainState], record: Record):
    note_layers(started(density=1.0), record)
    assert record.rows == []


def test_only_numbers_that_stand_alone_are_starred():
    assert layer_pattern("transformer.h.11.ln_1.weight") == "transformer.h.*.ln_1.weight"
    assert layer_pattern("0.weight") == "0.weight"
    assert layer_pattern("blocks.3") == "blocks.*"
