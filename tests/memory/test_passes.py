"""Passes in stretches against the whole step's ledger, and operations against hand counts."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.memory import predict
from sparing.memory.passes import trace

SHAPES = {name: tuple(tensor.shape) for name, tensor in zoo.tokens(2, 8).items()}
BATCH = {name: (shape, torch.int64) for name, shape in SHAPES.items()}


class Idle(torch.optim.Optimizer):
    """Holds nothing and changes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_the_largest_stretch_is_the_peak_of_the_step(make, checkpointing, accumulates):
    """The same step under the ledger that reports one peak; a gradient's category may be known a stretch later."""
    model = make()
    body = [name for name, _ in model.named_modules() if name.endswith((".0", ".1", ".2"))]
    found = trace(model, BATCH, checkpointing=checkpointing, accumulates=accumulates, marks=body, entries=body[:1])
    whole = predict(model, BATCH, Idle, checkpointing=checkpointing, accumulate=1 + accumulates)
    assert found.peak.total == whole.total
    assert found.backward == whole.phases["backward"]
    # the phase begins with the backward pass's first operation, which makes the gradient of the loss
    assert whole.phases["forward"].total - found.forward.total in {4, 8}
    assert set(found.stretches) >= {"forward", "loss", *body, f"into {body[0]}"}


def test_frozen_blocks_below_what_trains_have_no_stretch():
    model = zoo.llama(layers=3)
    top = "model.layers.2"
    marks = [f"model.layers.{index}" for index in range(3)]
    found = trace(model, BATCH, trainable=lambda name: name.startswith(top), marks=marks, entries=marks[:1])
    assert set(found.stretches) == {"forward", "loss", top}


def test_operations_of_a_full_step_are_six_per_weight_and_token_and_attention():
    """12·L·d per token and block for scores and values: forward 4, and twice that backward; embeddings multiply not."""
    layers, width, length, rows, vocabulary = 2, 16, 8, 2, 64
    block = 4 * width**2 + 3 * width * 2 * width
    tokens = rows * length
    expected = 6 * tokens * (layers * block + vocabulary * width) + 12 * layers * tokens * length * width
    assert trace(zoo.llama(layers=layers), BATCH).flops == expected
