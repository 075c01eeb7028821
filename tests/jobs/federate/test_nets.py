"""Nets for clients."""

from __future__ import annotations

import pickle

import pytest
import torch

from sparing.blocks import find_blocks
from sparing.errors import UserError
from sparing.jobs.federate.nets import net, sparse
from sparing.scaling.masks.mask_set import masks_of


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-bn", "cnn-gn"])
@pytest.mark.parametrize("shape", [(1, 40), (1, 8, 8), (3, 32, 32)])
def test_a_net_takes_rows_and_can_be_sent_to_processes(name, shape):
    make = pickle.loads(pickle.dumps(net(name, shape, 7)))
    model = make()
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    assert sum(block.role == "body" for block in find_blocks(model)) >= 2


def test_rows_that_cannot_be_convolved_are_refused():
    with pytest.raises(UserError, match="pass mlp"):
        net("cnn", (40,), 10)
    with pytest.raises(UserError, match="pass mlp"):
        net("cnn-bn", (1, 2, 2), 10)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-bn", "cnn-gn"])
def test_a_sparse_net_masks_what_is_neither_first_nor_last(name):
    make = pickle.loads(pickle.dumps(sparse(net(name, (1, 8, 8), 7), 1 / 4, seed=3)))
    model, again = make(), make()
    masks = masks_of(model)
    assert masks.plan.rule.form == "shifted"
    hidden = {"mlp": {"3.weight", "5.weight"}}.get(name, {"layers.1.conv.weight", "layers.2.conv.weight"})
    assert set(masks) == hidden
    assert all(abs(density - 1 / 4) < 0.02 for density in masks.densities.values())
    assert masks.digest() == masks_of(again).digest() != masks_of(sparse(net(name, (1, 8, 8), 7), 1 / 4, 4)()).digest()


@pytest.mark.parametrize("name", ["mlp", "cnn-bn"])
def test_a_sparse_net_needs_no_rate_of_its_own_under_sgd(name):
    """So a method's one learning rate is that of every layer: the factor is in the forward pass."""
    plan = masks_of(sparse(net(name, (1, 8, 8), 7), 1 / 8, seed=0)()).plan
    assert [entry.factors.lr for entry in plan.entries.values()] == pytest.approx([1.0] * len(plan.entries), rel=1e-12)
