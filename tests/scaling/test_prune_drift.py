"""The rules that the pruning benchmark tries: their κ by numpy, and the rates that a step then has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks import prune_drift as drift

from scaling import models
from sparing.scaling import GMP, apply_, plan

STEPS, METHOD = 20, GMP(final=0.25, start=0.2, until=0.7, every=3)


def share(step: int) -> float:
    return 1 - 0.9 * step / STEPS


@pytest.mark.parametrize(("kappa", "power"), [(drift.mean_of_losses, -0.5), (drift.last_loss, -1.0)])
def test_rates_go_with_what_is_left_of_the_schedule(monkeypatch, kappa, power):
    """AdamW from dense: lr = 1/(ρ A) κ^power at density ρ with the factor A in the forward pass; lr · λ stays."""
    monkeypatch.setattr(drift, "SCHEDULE", share)
    model = models.constant_mlp(16, std=0.3).double()
    chosen = plan(model)
    masks = apply_(model, chosen)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3))
    evolution = drift.Rest(model, masks, optimizer, METHOD, steps=STEPS, scale="energy", kappa=kappa, power=power)
    shares = np.array([share(step) for step in range(STEPS)])
    live, expected = 256, 1.0
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        evolution.step(step)
        now = round(METHOD.density(step, STEPS) * 256)
        if METHOD.due(step, STEPS) and now < live:
            left = shares[step + 1 :].sum() / shares.sum()
            expected = left if kappa is drift.last_loss else expected * now / live + left * (1 - now / live)
            live = now
        found = evolution.factors("2.weight")
        assert found.lr == pytest.approx(256 / live / found.forward * expected**power, rel=1e-12)
        assert found.lr * found.weight_decay == pytest.approx(1.0, rel=1e-12)
    assert live == 64
    assert expected < 0.5


def test_average_factors_hold_from_the_first_step():
    """By numpy: energies of a pruned Gaussian, weighted by the schedule."""
    data = drift.gather(drift.STUDY)
    model, masks = drift.prepare(drift.STUDY, data, drift.Cell("supar", 256, drift.DENSITY, -8.0, 0))
    optimizer = torch.optim.AdamW(masks.plan.groups(model, lr=1e-3))
    found = drift.Average(model, masks, optimizer, drift.METHOD, steps=drift.STUDY.steps, scale="density")
    energies = [drift.retained_gaussian(drift.METHOD.density(step, 200)) for step in range(200)]
    mean = np.average(energies, weights=[drift.SCHEDULE(step) for step in range(200)])
    factors = found.factors(next(iter(masks)))
    assert factors.forward == pytest.approx(mean**-0.5)
    assert factors.lr == pytest.approx(mean**-0.5)  # 1/ρ̄ in the weights, of which ρ̄^-1/2 is in the forward pass
