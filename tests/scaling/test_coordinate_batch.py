"""Batches that a check makes by itself fit the model and are the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.scaling.check.batch import default_batch, loss_of


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
