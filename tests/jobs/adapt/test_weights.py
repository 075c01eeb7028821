"""The weight network starts uniform and sees each token with what came before it, nothing after."""

from __future__ import annotations

import math

import torch

from sparing.jobs.adapt.weights import START, features, init_weights, weigh


def test_all_weights_start_equal():
    phi = init_weights(5, width=8, seed=3, dtype=torch.float64)
    read = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(weigh(phi, read), torch.full((7,), math.log(2) / 3, dtype=torch.float64))
    assert math.log(2) / 3 == START


def test_the_first_gradient_is_in_the_last_layer_alone():
    phi = {name: value.requires_grad_() for name, value in init_weights(5, width=8, seed=3).items()}
    weigh(phi, torch.ones(2, 5)).sum().backward()
    moved = {name for name, value in phi.items() if value.grad.abs().sum() > 0}
    assert moved == {"head.1.weight", "head.1.bias"}


def test_seeds_draw_different_networks():
    one, two = (init_weights(5, width=8, seed=seed)["body.0.weight"] for seed in (0, 1))
    assert not torch.equal(one, two)


def test_features_are_one_row_per_real_token_and_causal(lm):
    short, long = torch.tensor([256, *b"the cat"]), torch.tensor([256, *b"the cat sat down"])
    both = features(lm, [short, long])
    assert both.shape == (7 + 16, 2 * 16 + 1)
    torch.testing.assert_close(both[:7], both[7:14], rtol=1e-6, atol=1e-6)  # padding and what follows change nothing
    torch.testing.assert_close(features(lm, [short, long], batch=1), both, rtol=1e-6, atol=1e-6)
