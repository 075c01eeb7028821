"""Batches that a check makes by itself fit the model and are the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.scaling.check.batch import default_batch, loss_of
from sparing.scaling.check.coordinate import coordinate_check


def test_a_chain_gets_vectors_and_classes():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    inputs, classes = default_batch(model)
    assert inputs.shape == (64, 5)
    assert inputs.dtype == torch.float64
    assert int(classes.max()) < 3
    assert torch.equal(inputs, default_batch(model)[0])
    expected = nn.functional.cross_entropy(model(inputs), classes)
    assert torch.equal(loss_of(model, (inputs, classes)), expected)


def test_what_does_not_say_what_it_takes_is_refused():
    with pytest.raises(UserError, match="Conv2d does not say"):
        default_batch(nn.Conv2d(3, 4, 3))
    with pytest.raises(UserError, match="batch"):
        default_batch(nn.LayerNorm(3))


def test_a_language_model_gets_tokens():
    import zoo

    model = zoo.llama(layers=1)
    batch = default_batch(model)
    assert batch["input_ids"].shape == (2, 4)
    assert int(batch["input_ids"].max()) < 64
    assert loss_of(model, batch).ndim == 0


X, Y = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
BAD = {
    "a tensor": (X, r"batch: got a tensor of shape \(4, 8\); .*pass a tuple \(inputs, classes\)"),
    "what a DataLoader yields": ([X, Y], r"batch: got a tensor of shape \(4, 8\)"),
    "three": ((X, Y, Y), "batch: got tuple of 3"),
    "numbers": ((1.0, 2.0), "batch: got tuple of 2"),
    "one of several": ([(X, Y), X], "batch: got a tensor"),
}


def chain(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("name", BAD)
def test_a_batch_without_targets_is_refused_in_a_line(name):
    batch, match = BAD[name]
    with pytest.raises(UserError, match=match) as caught:
        coordinate_check(chain, (64,), (1.0,), batch=batch, seeds=(0,))
    assert "\n" not in str(caught.value)


def test_a_tensor_serves_a_loss_of_ones_own():
    asked = {"widths": (64, 128), "densities": (1.0,), "steps": 1, "seeds": (0,)}
    ours = coordinate_check(chain, batch=X, loss=lambda model, x: model(x).square().mean(), **asked)
    pair = coordinate_check(chain, batch=(X, Y), loss=lambda model, pair: model(pair[0]).square().mean(), **asked)
    assert ours.rows == pair.rows


def test_a_model_that_returns_no_loss_is_refused_in_a_line():
    import zoo

    tokens = zoo.tokens()["input_ids"]
    with pytest.raises(UserError, match="a mapping of input_ids; LlamaForCausalLM returns no loss"):
        loss_of(zoo.llama(layers=1), {"input_ids": tokens})
