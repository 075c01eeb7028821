"""Warm-up lives for the length of one step, where no scheduler can see it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lisa_loop import setup
from sparing.layersample import LayerSampling
from sparing.layersample.rates import ScaledRate, warmup_factor


def test_the_ramp_is_linear_and_ends() -> None:
    assert [warmup_factor(w, 4) for w in range(6)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_the_step_is_scaled_and_the_rate_is_not(rate) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [p], "lr": rate}], lr=1.0)
    ScaledRate(optimizer, lambda: 0.25)
    p.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(p, torch.full((2,), -0.125))
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_step_that_raises_does_not_scale_twice() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaled = ScaledRate(optimizer, lambda: 0.5)
    optimizer.param_groups[0]["weight_decay"] = "broken"
    p.grad = torch.ones(1)
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert p.item() == -0.5
    scaled.close()
    optimizer.step()
    assert p.item() == -1.5


def test_the_first_steps_of_every_interval_are_short() -> None:
    """With gradients of constant size, SGD's steps show the ramp: 1/3, 2/3, 1, 1 and again."""
    model, optimizer, sampler = setup(
        LayerSampling(active=1, period=4, warmup=2), optimizer=lambda params: torch.optim.SGD(params, lr=1.0)
    )
    sizes = []
    for step in range(8):
        sampler.begin_step(step)
        before = model.lm_head.weight.detach().clone()
        model.lm_head.weight.grad = torch.ones_like(before)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(float((before - model.lm_head.weight.detach()).mean()))
    assert sizes == pytest.approx([1 / 3, 2 / 3, 1, 1] * 2, rel=1e-12)
