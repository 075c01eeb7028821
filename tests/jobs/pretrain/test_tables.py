"""The tables agree with plan, optimizer and masks; what was predicted of a step stands beside what was counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparing.jobs.pretrain import tables
from sparing.jobs.pretrain.state import TrainState, take_step_
from sparing.jobs.pretrain.tables import (
    GRADIENTS,
    LIVE,
    PARAMETERS,
    PRODUCTS,
    STATE,
    STEP,
    WEIGHTS,
    note_layers,
    note_plan,
)
from sparing.report import Record
from sparing.scaling.plans.entries import layer_pattern


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


def test_decay_of_sgd_is_what_momentum_makes_of_it(started: Callable[..., TrainState], record: Record):
    """A matrix without gradients, many steps at one rate: the share that a step takes off in the end."""
    state = started(optimizer="sgd", width=8, density=1.0, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    note_plan(state, record)
    (row,) = [row for row in record.table("rates") if row["weights"] == "lm_head.weight"]
    assert row["decay_per_step"] == pytest.approx(0.01)
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    (group,) = [group for group in state.groups if "lm_head.weight" in group["param_names"]]
    steps = torch.optim.SGD([weight], lr=row["peak_rate"], momentum=0.9, weight_decay=group["weight_decay"])
    for _ in range(400):
        before, weight.grad = weight.detach().clone(), torch.zeros_like(weight)
        steps.step()
    shrunk = 1 - float((weight / before).detach()[0, 0])
    assert shrunk == pytest.approx(row["decay_per_step"], rel=0.15)  # to first order in lr λ / (1 − momentum)²


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


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "time_layer", lambda d_in, d_out, density, tokens: (d_in * 1e-6, d_out * 1e-6))


def cost(state: TrainState, steps: int = 3) -> dict[str, dict]:
    record = Record(question="?", settings={}, seed=0)
    tables.note_predicted(state, record)
    assert all(p.grad is None for p in state.model.parameters())
    for _ in range(steps):
        record.add("train", **take_step_(state))
    tables.fill_measured(state, record)
    return {row["quantity"]: row for row in record.table("cost")}


@pytest.mark.parametrize("backend", ["dense", "csr"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_counts_and_bytes_are_as_predicted(started: Callable[..., TrainState], backend: str, family: str):
    rows = cost(started(backend=backend, family=family))
    kind = "sparse" if backend == "csr" else "dense"
    for quantity in (PARAMETERS, LIVE, WEIGHTS, GRADIENTS, STATE):
        assert rows[quantity]["measured"] == rows[quantity][kind], quantity
    assert rows[STEP]["measured"] > 0


def test_operations_are_as_predicted_but_for_scores_computed_twice(started: Callable[..., TrainState]):
    state = started()
    row = cost(state)[PRODUCTS]
    layers, width, context = 2, 16, 16
    again = layers * 2 * state.tokens * context * width  # fused attention computes its scores again in backward
    assert row["measured"] == row["dense"] + again
    assert row["sparse"] < row["dense"]


def test_operations_of_experts_are_those_of_the_tokens_that_go_to_them(
    started: Callable[..., TrainState], tmp_path: Path
):
    """Two of four experts for each token; the configuration's head size is the rest's."""
    from transformers import Qwen2MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
    Qwen2MoeConfig(**sizes, **heads, **experts).save_pretrained(tmp_path)
    state = started(model_config=tmp_path, density=1.0)
    row = cost(state, steps=1)[PRODUCTS]
    again = 2 * 2 * state.tokens * 16 * 16  # fused attention computes its scores again in backward
    assert row["measured"] == row["dense"] + again
    unsaid = SimpleNamespace(model=SimpleNamespace(config=None), masks=state.masks, tokens=state.tokens)
    assert tables._rows_seen(unsaid) == {}


def test_sparse_products_cannot_be_watched(started: Callable[..., TrainState]):
    assert cost(started(backend="csr"))[PRODUCTS]["measured"] is None


def test_the_trial_changes_no_bit_of_the_run(started: Callable[..., TrainState], same: Callable[..., bool]):
    one, other = started(dynamic="rigl"), started(dynamic="rigl")
    cost(one, steps=3)
    for _ in range(3):
        take_step_(other)
    assert same(dict(one.model.state_dict()), dict(other.model.state_dict()))


def test_the_median_step():
    record = Record(question="?", settings={}, seed=0)
    assert tables.median_step(record) is None
    for seconds in (5.0, 6.0, 6.5, 9.5):
        record.add("train", seconds=seconds)
    assert tables.median_step(record) == 1.0
    assert torch.is_grad_enabled()
