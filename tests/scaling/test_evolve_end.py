"""What an evolution leaves behind once masks change no more."""

from __future__ import annotations

import torch

from scaling import models
from sparing.scaling import GMP, Evolution, SuPar, apply_, plan


def test_a_closed_evolution_keeps_its_factors_and_its_masks():
    torch.manual_seed(0)
    model = models.mlp(32).double()
    masks = apply_(model, plan(model, base=models.mlp(16).double(), rule=SuPar()))
    optimizer = torch.optim.AdamW(masks.plan.groups(model, lr=1e-3))
    evolution = Evolution(model, masks, optimizer, GMP(final=0.25, start=0.0, every=1), steps=8, scale="density")
    x, used = torch.randn(4, models.mlp(32)[0].in_features, dtype=torch.float64), []
    optimizer.register_step_post_hook(lambda *_: used.append(evolution.factors(name).lr))
    (name,) = list(evolution.masks)[:1]
    for step in range(12):
        if step == 4:
            evolution.close()
            held = masks.digest()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        evolution.step(step)
    assert masks.digest() == held
    group = next(group for group in optimizer.param_groups if name in group["param_names"])
    assert group["lr_factor"] == used[-1] == used[5] != 1.0
