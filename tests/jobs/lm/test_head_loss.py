"""A loss in parts against torch's own of all logits, and what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.head_loss import head_loss
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import loss_of


def rows_for(head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, head.in_features, generator=maker, dtype=head.weight.dtype, requires_grad=True)
    targets = torch.randint(head.out_features, (20,), generator=maker)
    targets[3:9] = IGNORED  # a whole part of six among them
    return hidden, targets


@pytest.mark.parametrize("at_once", [1, 6, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_all_logits(at_once, bias):
    head = nn.Linear(7, 33, bias=bias, dtype=torch.float64)
    hidden, targets = rows_for(head)
    inputs = [hidden, *head.parameters()]
    want = F.cross_entropy(head(hidden), targets, ignore_index=IGNORED, reduction="sum")
    got = head_loss(head, hidden, targets, at_once)
    # a few roundings of float64 in sums of 33 numbers below ten
    assert torch.allclose(got, want, rtol=1e-14)
    for mine, theirs in zip(torch.autograd.grad(got * 3, inputs), torch.autograd.grad(want * 3, inputs), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", ["", "lm_head", "layers.0"])
def test_a_model_learns_the_same_from_parts(tied, frozen):
    """Every gradient of a language model, with a part of it frozen, in float64."""
    model = zoo.llama(tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    ids = zoo.tokens(3, 9)["input_ids"]

    def gradients(at_once: int) -> list[torch.Tensor]:
        trained = [p for p in model.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss_of(model, ids, ids, at_once=at_once), trained))

    for mine, theirs in zip(gradients(4), gradients(0), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_head_with_adapters_draws_the_same_dropout_twice():
    """Its logits are computed again in the backward pass; the slope along a line is that of differences."""
    model = with_adapters_(zoo.llama(layers=1), Lora(rank=2, targets="lm_head", dropout=0.5), seed=0).double().train()
    line = [p for p in model.parameters() if p.requires_grad]
    ids = zoo.tokens(2, 9)["input_ids"]

    def loss(moved: float) -> torch.Tensor:
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in line:
                parameter += moved
        return loss_of(model, ids, ids, at_once=4)

    slope = sum(gradient.sum() for gradient in torch.autograd.grad(loss(0.1), line))
    ahead, behind = loss(1e-6).item(), loss(-2e-6).item()
    # a difference of float64 losses near 60 over 2e-6 is good to 1e-8 of a slope near 10
    assert slope.item() == pytest.approx((ahead - behind) / 2e-6, rel=1e-5)


def test_the_loss_of_wrong_certainty_is_finite_and_masked_rows_weigh_nothing():
    head = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.arange(10.0).view(5, 2) * 1e3)
    hidden = torch.ones(3, 2, requires_grad=True)
    targets = torch.tensor([0, IGNORED, 4])
    got, want = head_loss(head, hidden, targets, 2), F.cross_entropy(head(hidden), targets, reduction="sum")
    assert torch.equal(got, want)
    got.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[1], torch.zeros(2))


def test_without_gradients_nothing_is_kept_and_backward_twice_is_refused():
    head = nn.Linear(4, 9)
    hidden, targets = rows_for(head)
    targets %= 9
    with torch.no_grad():
        assert not head_loss(head, hidden, targets, 8).requires_grad
    loss = head_loss(head, hidden, targets, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes backward once"):
        loss.backward()
