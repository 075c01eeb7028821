"""Masks of tables that change in training: the factor is on what is looked up, not on the ids."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import GMP
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan

IDS = torch.arange(12).view(3, 4) % 11


def evolving(scale: str, *, tied: bool = False):
    layers = [nn.Embedding(11, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 11, bias=False)]
    model = models.seeded(lambda: nn.Sequential(*layers))
    if tied:
        model[3].weight = model[0].weight
    chosen = plan(model, inputs=IDS)
    masks = apply_(model, chosen)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3))
    names = ["0.weight", "1.weight"]
    return (
        model,
        optimizer,
        Evolution(model, masks, optimizer, GMP(final=0.5, start=0.0, every=1), steps=4, scale=scale, names=names),
    )


@pytest.mark.parametrize("scale", ["density", "energy", "none"])
def test_a_table_is_pruned_while_it_trains(scale):
    model, optimizer, evolution = evolving(scale)
    for step in range(4):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()
        evolution.step(step)
    table, factor = model[0].weight.detach(), evolution.factors("0.weight").forward
    torch.testing.assert_close(model[0](IDS), factor * table[IDS])
    assert (factor > 1) == (scale == "energy")
    assert evolution.masks.density("0.weight") == pytest.approx(0.5, abs=0.01)


def test_a_table_that_also_reads_out_has_no_energy_of_its_own():
    with pytest.raises(UserError, match=r"0\.weight: got a table that also reads out"):
        evolving("energy", tied=True)
    evolving("density", tied=True)
