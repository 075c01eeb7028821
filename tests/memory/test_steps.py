"""What a step does before it is counted: flags, checkpointing, the loss, and the mistakes people make."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import zoo
from sparing.errors import UserError
from sparing.memory.steps import Training, checkpoint_, freeze_, output_loss, prepare_, step_of

SGD = partial(torch.optim.SGD, lr=0.1)


def test_freezing_thaws_what_was_frozen():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    freeze_(model, {"weight"})
    assert model.weight.requires_grad
    assert not model.bias.requires_grad


def test_an_unknown_name_is_named():
    with pytest.raises(UserError, match=r"'wieght'.*no such parameter"):
        freeze_(nn.Linear(2, 2), {"wieght", "weight"})


def test_a_step_needs_something_to_train():
    with pytest.raises(UserError, match="nothing would train"):
        prepare_(nn.Linear(2, 2), Training(optimizer=SGD, trainable=lambda name: False))


def test_the_optimizer_gets_what_trains_and_the_model_is_in_training_mode():
    model = nn.Linear(2, 2).eval()
    optimizer = prepare_(model, Training(optimizer=SGD, trainable={"bias"}))
    assert optimizer.param_groups[0]["params"] == [model.bias]
    assert model.training


def test_the_usual_step_is_the_mean_over_micro_batches():
    """Accumulating the same batch three times moves the weights as once, and leaves no gradients."""
    moved = []
    batch = {"x": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)}
    for accumulate in (1, 3):
        model = zoo.redraw_(nn.Linear(4, 5).double())
        training = Training(optimizer=SGD, accumulate=accumulate, loss=lambda m, b: m(b["x"]).square().mean())
        step_of(training)(model, prepare_(model, training), batch)
        assert all(parameter.grad is None for parameter in model.parameters())
        moved.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    # three thirds of a gradient of size 0.1: rounding of a sum of three float64
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-16)


@pytest.mark.parametrize("wrong", [{"accumulate": 0}, {"accumulate": -1}])
def test_a_step_needs_a_micro_batch(wrong):
    with pytest.raises(UserError, match="accumulate"):
        Training(optimizer=SGD, **wrong)


@pytest.mark.parametrize("other", [{"loss": output_loss}, {"accumulate": 2}])
def test_a_whole_step_excludes_its_parts(other):
    with pytest.raises(UserError, match="pass only the step"):
        Training(optimizer=SGD, step=lambda model, optimizer, batch: None, **other)


def test_a_model_without_a_loss_says_so():
    model = zoo.llama(layers=1)
    with pytest.raises(UserError, match="without a loss"):
        output_loss(model, {"input_ids": zoo.tokens()["input_ids"]})


def test_checkpointing_does_not_make_the_frozen_embedding_require_gradients():
    model = zoo.llama(layers=3)
    freeze_(model, lambda name: "layers.2." in name or "head" in name)
    checkpoint_(model)
    model.train()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    embedded = model.model.embed_tokens(zoo.tokens()["input_ids"])
    assert not embedded.requires_grad


def test_checkpointing_a_plain_module_is_refused():
    with pytest.raises(UserError, match=r"Sequential.*torch\.utils\.checkpoint"):
        checkpoint_(nn.Sequential(nn.Linear(1, 1)))
