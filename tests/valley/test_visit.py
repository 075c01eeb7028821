"""A lent model takes the weights of others and gets its own back, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.valley.apply import live_model, loading_states, state_digests


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_weights_and_buffers_are_put_in_and_taken_back():
    model, other = net(), net()
    other[1].running_mean.fill_(3.0)
    other[1].num_batches_tracked.fill_(9)
    before, storage = state_digests(model), model[0].weight.data_ptr()
    with loading_states(model) as put:
        assert not model.training
        put(other.state_dict())
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
        put(net().state_dict())
    assert state_digests(model) == before
    assert model[0].weight.data_ptr() == storage


def test_everything_is_taken_back_after_an_exception():
    model = net()
    before = state_digests(model)

    def fail() -> None:
        with loading_states(model) as put:
            put(net().state_dict())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert state_digests(model) == before


def test_a_lender_may_be_wrapped_and_tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    other = copy.deepcopy(model)
    other[0].weight.data.fill_(5.0)
    with loading_states(nn.DataParallel(model)) as put:
        put(other.state_dict())
        assert model[1].weight is model[0].weight
        assert float(model[1].weight.detach().mean()) == 5.0


def test_a_state_that_lacks_a_parameter_is_refused():
    with pytest.raises(UserError, match=r"state at '0\.weight': got nothing"), loading_states(net()) as put:
        put({"other": torch.zeros(1)})


def test_the_host_is_the_one_given_or_the_first_live_one():
    first, second = net(), net()
    assert live_model([first.state_dict(), second]) is second
    assert live_model([first, second]) is first
    assert live_model([first], second) is second
    with pytest.raises(UserError, match="states only"):
        live_model([first.state_dict()])
