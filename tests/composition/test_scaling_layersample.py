"""A sparse, scaled model trained a few blocks at a time: rates keep their ratios at every switch, zeros stay zeros."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zoo
from lisa_loop import train
from sparing import scaling
from sparing.layersample import LayerSampling, Sampler

LR = 1e-2
SETTINGS = [LayerSampling(active=1, period=2), LayerSampling(active=2, period=1, state="keep", embed=False, head=False)]


def start(density: float = 0.25):
    """A GPT-2 at a quarter of its weights, twice as wide as its base."""
    model = zoo.gpt2(layers=3, width=32)
    chosen = scaling.plan(model, base=zoo.gpt2(layers=3, width=16), density=density)
    masks = scaling.apply_(model, chosen, seed=1)
    optimizer = torch.optim.AdamW(masks.plan.groups(model, lr=LR), foreach=False)
    return model, masks, optimizer


@pytest.mark.parametrize("settings", SETTINGS, ids=["one block", "two blocks, state kept"])
def test_rates_by_group_survive_every_switch(settings):
    """With a schedule on top: what a parameter gets is its factor times the rate of the step, whoever trains."""
    model, masks, optimizer = start()
    expected = {name: entry.factors.lr for name, entry in masks.plan.entries.items()}
    named = {id(p): name for name, p in model.named_parameters()}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    sampler = Sampler(model, optimizer, settings, seed=0)
    for step in range(6):
        train(model, optimizer, sampler, steps=[step])
        scaling_of = {named[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for name, rate in scaling_of.items():
            assert rate == pytest.approx(LR * expected[name] / (1 + step), rel=1e-12)
        schedule.step()
    assert len({round(factor, 6) for factor in expected.values()}) > 1  # else nothing was tested


@pytest.mark.parametrize("settings", SETTINGS, ids=["one block", "two blocks, state kept"])
def test_masked_weights_stay_exactly_zero(settings):
    model, masks, optimizer = start()
    masked = {name: ~mask.bool() for name, mask in masks.items()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, Sampler(model, optimizer, settings, seed=0), steps=range(6))
    weights = dict(model.named_parameters())
    assert sum(int(dead.sum()) for dead in masked.values()) > 10_000
    assert all(bool((weights[name][dead] == 0).all()) for name, dead in masked.items())
    assert any(not torch.equal(weights[name], before[name]) for name in masked)


def test_a_mask_forgotten_is_seen():
    """The same loop on weights that were put to zero by hand: they come alive, so the test above can fail."""
    model = zoo.gpt2(layers=3, width=32)
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("c_fc.weight"))
    with torch.no_grad():
        weight[:, ::2] = 0
    optimizer = partial(torch.optim.AdamW, lr=LR, foreach=False)(model.parameters())
    train(model, optimizer, Sampler(model, optimizer, LayerSampling(active=3, period=2), seed=0), steps=range(2))
    assert bool((dict(model.named_parameters())[name][:, ::2] != 0).any())
