"""Landscapes and averages of sparse models: a masked weight stays zero along every direction and in every merge."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from sparing import scaling
from sparing.seeds import stream
from sparing.valley import Noise, merge, scan, sign_agreement
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import NoiseKind, Special, SpecialKind
from sparing.valley.directions.resolve import direction_of


def net(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def sparse(seed: int = 0):
    torch.manual_seed(seed)
    model = net()
    masks = scaling.apply_(model, scaling.plan(model, base=net(16), density=0.25), seed=0)
    return model, masks


INPUTS = torch.randn(12, 8, generator=stream(0, "inputs"))


def dead_of(masks) -> dict[str, torch.Tensor]:
    return {name: ~mask.bool() for name, mask in masks.items()}


DIRECTIONS = [
    *(Noise(kind, sign=sign) for kind in get_args(NoiseKind) for sign in ("raw", "consistent")),
    *(Special(kind) for kind in get_args(SpecialKind) if kind != "initial"),
]


@pytest.mark.parametrize("direction", DIRECTIONS, ids=repr)
def test_a_masked_weight_is_zero_at_every_point(direction):
    model, masks = sparse()
    dead = dead_of(masks)
    resolved = direction_of(direction, model, seed=3)
    assert any(bool((value != 0).any()) for value in resolved.vector.values())
    weights = dict(model.named_parameters())
    with perturbing(model) as perturber:
        for at in (-1.0, 0.5):
            perturber.to(resolved.vector, at)
            assert all(bool((weights[name][where] == 0).all()) for name, where in dead.items())


def test_a_scan_leaves_masks_and_weights_as_they_were():
    model, masks = sparse()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(candidate: nn.Module) -> dict[str, float]:
        assert all(bool((dict(candidate.named_parameters())[n][d] == 0).all()) for n, d in dead.items())
        return {"loss": float(candidate(INPUTS).square().mean())}

    dead = dead_of(masks)
    found = scan(model, loss, Noise("gaussian"), points=3, draws=2)
    assert found.values["loss"].shape == (2, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_models_of_one_mask_merge_into_that_mask_and_zeros_vote_for_nobody():
    (one, masks), (two, _) = sparse(0), sparse(1)
    mean = merge([dict(one.named_parameters()), dict(two.named_parameters())])
    for name, where in dead_of(masks).items():
        assert bool((mean[name][where] == 0).all())
    agreed = sign_agreement(one, two)
    votes = [(p.sign(), q.sign()) for p, q in zip(one.parameters(), two.parameters(), strict=True)]
    alive = sum(int(((p != 0) & (q != 0)).sum()) for p, q in votes)
    alike = sum(int(((p == q) & (p != 0)).sum()) for p, q in votes)
    assert agreed.element == pytest.approx(alike / alive, abs=1e-12)
