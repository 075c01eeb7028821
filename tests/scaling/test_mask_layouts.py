"""Masks of weights that hold several matrices, experts or groups of channels; and of a law that fixes neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import GMP, SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.laws import Bernoulli, Blocks, ConstantFanIn, NofM
from sparing.scaling.plans.planning import plan


class Experts(nn.Module):
    """Four experts side by side, stored (expert, inputs, outputs), and a router that weighs them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(3, width), nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / (2 * width) ** 0.5)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        hidden = torch.bmm(x.expand(4, *x.shape), self.up).relu()
        shares = self.router(x).softmax(-1).t()[..., None]
        return self.head(x + (shares * torch.bmm(hidden, self.down)).sum(0))


class Groups(nn.Module):
    """A convolution in four groups, transposed or not."""

    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.conv = kind(width, 2 * width, 3, padding=1, groups=4)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.stem(x).relu()).relu().mean((2, 3)))


DATA = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def experts(law=None, density: float = 0.1):
    model = models.seeded(lambda: Experts(16))
    chosen = plan(model, inputs=DATA, density=density, least_fan_in=0, sparse=["up", "down"])
    return model, apply_(model, chosen, masks=law)


def groups(kind: type[nn.Module], density: float, law=None):
    model = models.seeded(lambda: Groups(kind, 32))
    chosen = plan(model, inputs=IMAGES, density=density, least_fan_in=0, sparse=["conv.weight"])
    return model, apply_(model, chosen, masks=law)


def test_the_dead_of_experts_are_those_of_each():
    _, masks = experts(Bernoulli())
    expected = {name: (int((~mask.any(1)).sum()), int((~mask.any(2)).sum())) for name, mask in masks.items()}
    assert masks.dead == expected
    assert expected["up"][0] > 0


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_dead_of_a_grouped_convolution_are_its_outputs_without_gradient_and_its_inputs(kind):
    """By the layer itself: with weights of one, what a mask cuts off gives nothing or gets no gradient."""
    model, masks = groups(kind, 0.01, Bernoulli())
    with torch.no_grad():
        model.conv.weight.copy_(masks["conv.weight"])
    x = torch.ones(1, 32, 5, 5, requires_grad=True)
    outputs = model.conv(x) - model.conv.bias[:, None, None]
    outputs.sum().backward()
    cut = [int((~values.ne(0).any(-1).any(-1)).sum()) for values in (outputs, x.grad)]
    assert masks.dead == {"conv.weight": tuple(cut)}
    assert all(cut)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_every_output_of_a_grouped_convolution_keeps_as_many_inputs(kind):
    """Eight channels of a 3 × 3 kernel at 1/18: four."""
    _, masks = groups(kind, 1 / 18, ConstantFanIn())
    mask = masks["conv.weight"]
    rows = mask.flatten(1) if kind is nn.Conv2d else mask.view(4, 8, 16, 9).transpose(1, 2).flatten(2)
    assert rows.sum(-1).unique().tolist() == [4]
    assert masks.dead.get("conv.weight", (0, 0))[0] == 0
    assert not torch.equal(rows[:16], rows[16:32]) if kind is nn.Conv2d else not torch.equal(rows[0], rows[1])


def test_grown_weights_of_experts_have_the_moment_of_their_own_row():
    model, masks = experts(density=0.25)
    optimizer = torch.optim.SGD(masks.plan.groups(model, lr=0.1))
    evolution = Evolution(model, masks, optimizer, SET(every=1), steps=10, scale="none", names=["up"])
    state = optimizer.state[model.up]
    second = state["exp_avg_sq"] = torch.rand(model.up.shape).where(masks["up"], 0.0)
    before, held = masks["up"].clone(), second.clone()
    evolution.step(0)
    evolution.step(1)
    kept, grown = before & masks["up"], masks["up"] & ~before
    assert grown.any()
    for expert in range(4):
        for unit in range(32):
            mine, fresh = kept[expert, :, unit], grown[expert, :, unit]
            if mine.any() and fresh.any():
                mean = held[expert, :, unit][mine].mean().expand(int(fresh.sum()))
                torch.testing.assert_close(state["exp_avg_sq"][expert, :, unit][fresh], mean)


@pytest.mark.parametrize(("method", "refused"), [(RigL(), True), (SET(), True), (GMP(final=0.25, initial=0.5), False)])
def test_neighbours_that_a_law_holds_together_are_pruned_but_not_grown(method, refused):
    model = models.mlp(32)
    chosen = plan(model, density=0.5)
    masks = apply_(model, chosen, masks=NofM(n=2, m=4))
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=0.01))
    if refused:
        with pytest.raises(UserError, match=r"2\.weight: got a mask of NofM\(n=2, m=4\); weights that grow anywhere"):
            Evolution(model, masks, optimizer, method, steps=400)
        return
    evolution = Evolution(model, masks, optimizer, method, steps=400)
    for step in (100, 200, 300):
        evolution.step(step)
    assert masks.density("2.weight") == 0.25
    assert masks["2.weight"].view(-1, 4).sum(1).max() <= 2


def test_tiles_that_are_live_as_a_whole_are_not_grown():
    model = models.mlp(32)
    chosen = plan(model, density=0.5)
    masks = apply_(model, chosen, masks=Blocks(size=4))
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=0.01))
    with pytest.raises(UserError, match=r"2\.weight: got a mask of Blocks\(size=4\); weights that grow anywhere"):
        Evolution(model, masks, optimizer, RigL(), steps=400)
