"""Nets for clients."""

from __future__ import annotations

import pickle

import pytest
import torch

from sparing.blocks import find_blocks
from sparing.errors import UserError
from sparing.jobs.federate.nets import net


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
