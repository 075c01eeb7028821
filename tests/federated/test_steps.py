"""A step equals torch's own SGD, AdamW and clipping, for one client and for many."""

from __future__ import annotations

import pytest
import torch

from sparing.federated.client.optimizers import clip_, first_clients, step_
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
    moments = {}
    for step in range(4):
        grads = {"w": draw(3, 2) * step, "b": draw(2) + step}
        for parameter, grad in zip(theirs, grads.values(), strict=True):
            parameter.grad = grad.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
            clip_(grads, clip)
        optimizer.step()
        step_(ours, grads, moments, 0.3, schedule, step)
    for mine, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-14, atol=1e-15)  # a few roundings of float64


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_has_the_bits_of_torch(betas, decay):
    schedule = Schedule(optimizer="adamw", momentum=betas[0], beta2=betas[1], eps=1e-6, weight_decay=decay)
    ours = {"w": draw(3, 2).clone(), "b": draw(2).clone()}
    theirs = [value.clone().requires_grad_() for value in ours.values()]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=betas, eps=1e-6, weight_decay=decay, foreach=False)
    moments = {}
    for step in range(5):
        grads = {"w": draw(3, 2) * step, "b": draw(2) + step}
        for parameter, grad in zip(theirs, grads.values(), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        step_(ours, grads, moments, 0.01, schedule, step)
        for mine, parameter in zip(ours.values(), theirs, strict=True):
            assert torch.equal(mine, parameter.detach())


def test_adamw_of_stacked_clients_that_end_early_is_that_of_each():
    schedule = Schedule(optimizer="adamw", weight_decay=0.1)
    full, moments = {"w": draw(3, 4).clone()}, {}
    apart = [({"w": full["w"][at].clone()}, {}) for at in range(3)]
    for step, left in enumerate((3, 3, 2, 1)):  # the last client makes two steps, the first four
        moments = first_clients(moments, left)
        grads = draw(3, 4) * (step + 1)
        step_({"w": full["w"][:left]}, {"w": grads[:left].clone()}, moments, 0.01, schedule, step)
        for at in range(left):
            step_(apart[at][0], {"w": grads[at].clone()}, apart[at][1], 0.01, schedule, step)
    assert torch.equal(full["w"], torch.stack([own["w"] for own, _ in apart]))


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
    step_(params, {"w": torch.ones(2)}, {}, 0.5, Schedule(weight_decay=1.0), 0)
    assert params["w"].tolist() == [0.0, 0.0]
    assert params["v"].tolist() == [1.0, 1.0]
