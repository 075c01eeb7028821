"""Masks that move under every optimizer class of torch that steps a dense matrix by a rule."""

from __future__ import annotations

import pytest
import torch

from scaling import models
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import SET
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan

STEPS, METHOD = 24, SET(every=4, share=0.5)

# Lion is of the same kind as Adam; LBFGS and Adafactor have no rule, SparseAdam steps no matrix with a dense gradient.
STEPPERS = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}


@pytest.mark.parametrize("name", STEPPERS)
def test_masks_that_move_are_held_under_every_optimizer(name):
    """Grown weights are neither stuck nor leaping: their first mean step is 1/20 to 3 times that of the others."""
    model = models.constant_mlp(32, std=0.3, bias=False).double()  # torch's Muon takes matrices only
    chosen = plan(model, density=0.25, optimizer={"SGD": "sgd", "ASGD": "sgd", "Muon": "muon"}.get(name, "adam"))
    masks = apply_(model, chosen)
    groups = chosen.groups(model, lr=1e-2)
    for group in groups if name in {"SGD", "ASGD", "Rprop", "Muon"} else ():
        group.pop("eps", None)
    for group in groups if name == "Rprop" else ():
        group.pop("weight_decay")
    optimizer = STEPPERS[name](groups)
    evolution = Evolution(model, masks, optimizer, METHOD, steps=STEPS, scale="none")
    seen, grown = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (model(x) - (x[:, :4] * x[:, 4:]).tanh()).square().mean().backward()
        before = {n: (model.get_parameter(n).detach().clone(), mask.clone()) for n, mask in masks.items()}
        optimizer.step()
        for n, new in grown.items():
            moved = (model.get_parameter(n).detach() - before[n][0]).abs()
            seen.append(float(moved[new].mean() / moved[masks[n] & ~new].mean()))
        evolution.step(step)
        masks.check(optimizer)
        assert not any(model.get_parameter(n)[~mask].any() for n, mask in masks.items())
        due = METHOD.due(step, STEPS)
        grown = {n: mask & ~before[n][1] for n, mask in masks.items()} if due else {}
    assert len(seen) == 2 * len(evolution.history) > 0
    assert min(seen) > 0.05
    assert max(seen) < 3
