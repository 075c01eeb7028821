"""A step equals torch's own SGD and clipping, for one client and for many."""

from __future__ import annotations

import pytest
import torch

from sparing.federated.client.train import clip_, sgd_
from sparing.federated.settings import Schedule
from sparing.seeds import stream


def draw(*shape):
    return torch.randn(*shape, generator=stream(1, "step", *shape), dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_torch(momentum, decay, clip):
    schedule = Schedule(momentum=momentum, weight_decay=decay)
    ours = {"w": draw(3, 2).clone(), "b": draw(2).clone()}
    theirs = [value.clone().requires_grad_() for value in ours.values()]
    optimizer = torch.optim.SGD(theirs, lr=0.3, momentum=momentum, weight_decay=decay)
    momenta = {}
    for step in range(4):
        grads = {"w": draw(3, 2) * step, "b": draw(2) + step}
        for parameter, grad in zip(theirs, grads.values(), strict=True):
            parameter.grad = grad.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
            clip_(grads, clip)
        optimizer.step()
        sgd_(ours, grads, momenta, 0.3, schedule)
    for mine, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-14, atol=1e-15)  # a few roundings of float64


def test_stacked_clients_are_clipped_one_by_one():
    together = {"w": draw(4, 3, 2).clone(), "b": draw(4, 2).clone(), "s": draw(4).clone()}
    apart = [{name: value[at].clone() for name, value in together.items()} for at in range(4)]
    clip_(together, 1.5, stacked=True)
    for at, one in enumerate(apart):
        clip_(one, 1.5)
        for name, value in one.items():
            torch.testing.assert_close(together[name][at], value, rtol=1e-14, atol=0)


def test_a_short_gradient_stays():
    grads = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    clip_(grads, 5.1)
    assert grads["w"].tolist() == [3.0, 4.0]


def test_parameters_without_gradient_stay():
    params = {"w": torch.ones(2), "v": torch.ones(2)}
    sgd_(params, {"w": torch.ones(2)}, {}, 0.5, Schedule(weight_decay=1.0))
    assert params["w"].tolist() == [0.0, 0.0]
    assert params["v"].tolist() == [1.0, 1.0]
