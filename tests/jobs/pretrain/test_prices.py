"""What was predicted of a step stands beside what was counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparing.jobs.pretrain import prices
from sparing.jobs.pretrain.prices import GRADIENTS, LIVE, PARAMETERS, PRODUCTS, STATE, STEP, WEIGHTS
from sparing.jobs.pretrain.state import TrainState
from sparing.jobs.pretrain.step import take_step_
from sparing.report import Record


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "time_layer", lambda d_in, d_out, density, tokens: (d_in * 1e-6, d_out * 1e-6))


def cost(state: TrainState, steps: int = 3) -> dict[str, dict]:
    record = Record(question="?", settings={}, seed=0)
    prices.note_predicted(state, record)
    assert all(p.grad is None for p in state.model.parameters())
    for _ in range(steps):
        record.add("train", **take_step_(state))
    prices.fill_measured(state, record)
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
    assert prices.median_step(record) is None
    for seconds in (5.0, 6.0, 6.5, 9.5):
        record.add("train", seconds=seconds)
    assert prices.median_step(record) == 1.0
    assert torch.is_grad_enabled()
