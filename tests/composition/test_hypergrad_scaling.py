"""A sparse model as a function of its weights: a mask kept by hooks is refused, a mask in the step is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing import hypergrad as hg
from sparing import scaling
from sparing.errors import UserError
from sparing.scaling.model.fold import remove_


def sparse() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    scaling.apply_(model, scaling.plan(model, density=0.25), seed=0)
    return model


def test_masks_that_a_function_of_weights_would_lose_are_refused():
    with pytest.raises(UserError, match=r"model\.2\.weight: got a hook on its gradient.*scaling\.apply\.remove_"):
        hg.stateless(sparse())


def test_weights_multiplied_by_their_mask_stay_zero_and_send_no_hypergradient():
    """The rate of a masked weight changes nothing, so its hypergradient is zero; that of a live one is not."""
    model = sparse()
    mask = (model[2].weight != 0).double()
    remove_(model)
    theta, call = hg.stateless(model)
    rates = torch.full_like(mask, 0.1).requires_grad_()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for _ in range(2):
        leaves = {name: value if value.requires_grad else value.requires_grad_() for name, value in theta.items()}
        loss = (call({**leaves, "2.weight": leaves["2.weight"] * mask}, x) - y).square().mean()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), create_graph=True), strict=True))
        theta = {name: value - (rates if name == "2.weight" else 0.1) * grads[name] for name, value in leaves.items()}
    assert bool((theta["2.weight"][mask == 0] == 0).all())
    (found,) = torch.autograd.grad((call(theta, x) - y).square().mean(), [rates])
    assert bool((found[mask == 0] == 0).all())
    assert bool((found[mask == 1] != 0).all())
