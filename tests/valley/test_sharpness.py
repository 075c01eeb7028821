"""Sharpness against the exact maximum of a quadratic over a ball, in float64, and against first order on a net."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from refusals import refused
from sparing.valley.scans.curvature import gradient
from sparing.valley.scans.sharpness import sharpness
from valley import walks
from valley.test_curvature import data, loss, net

SIZE = 8


class Weights(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values.clone())


def quadratic(*, negative: bool, slope: float):
    """A Hessian with well separated eigenvalues, a gradient, and weights of different sizes."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    values = torch.linspace(0.1, 3.0, SIZE, dtype=torch.float64)
    if negative:
        values[0] = -5.0  # larger than every positive one: a plain power iteration would go there
    hessian = basis @ torch.diag(values) @ basis.T
    weights = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    tilt = slope * torch.randn(SIZE, generator=generator, dtype=torch.float64)

    def value(model, batch):
        step = model.weight - weights
        return tilt @ step + step @ hessian @ step / 2

    return weights, tilt, hessian, value


def highest(tilt, hessian, radius):
    """Maximum of g·ε + εᵀHε/2 over ‖ε‖ = ρ by the secular equation: (μ − H) ε = g with μ ≥ λmax."""
    values, basis = torch.linalg.eigh(hessian)
    inner = basis.T @ tilt

    def miss(mu):
        return float((inner / (mu - values)).norm()) - radius

    top = float(values[-1])
    mu = brentq(miss, top + 1e-12, top + float(inner.norm()) / radius + 1.0, xtol=1e-14)
    step = basis @ (inner / (mu - values))
    return float(tilt @ step + step @ hessian @ step / 2)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_the_highest_rise_of_a_quadratic(adaptive, negative):
    weights, tilt, hessian, value = quadratic(negative=negative, slope=0.3)
    scale = weights.abs() if adaptive else torch.ones(SIZE, dtype=torch.float64)
    exact = highest(scale * tilt, scale[:, None] * hessian * scale, 0.7)
    model = Weights(weights)
    found = sharpness(model, value, [None], radius=0.7, adaptive=adaptive, steps=300)
    assert found.value == pytest.approx(exact, rel=1e-9)  # a linearly convergent iteration, 300 steps of it
    assert found.value <= exact * (1 + 1e-12)
    # SAM's own step in closed form
    up = scale * tilt
    step = 0.7 * scale * up / up.norm()
    assert found.first == pytest.approx(float(tilt @ step + step @ hessian @ step / 2), rel=1e-12)
    assert torch.equal(model.weight, weights)


def test_at_a_minimum_it_is_half_the_top_eigenvalue_times_the_squared_radius():
    weights, _, _, value = quadratic(negative=False, slope=0.0)
    found = sharpness(Weights(weights), value, [None], radius=0.2, steps=300)
    assert found.value == pytest.approx(3.0 * 0.04 / 2, rel=1e-9)
    assert found.slope == 0.0


@pytest.mark.parametrize("mode", ["eval", "batch"])
def test_a_small_ball_on_a_net_is_first_order_and_leaves_the_net_alone(mode):
    model = net(norm=True)
    before = walks.state(model)
    found = sharpness(model, loss, data(), radius=1e-5, steps=3, mode=mode)
    slope = gradient(model, loss, data(), mode=mode)
    length = math.sqrt(sum(float(value.square().sum()) for value in slope.values()))
    # the second-order term, λmax ρ / 2 ‖g‖, is below 1e-4 of it
    assert found.value == pytest.approx(1e-5 * length, rel=1e-3)
    assert found.slope == pytest.approx(length, rel=1e-12)
    assert walks.same(before, walks.state(model))


def test_what_it_refuses():
    model = Weights(torch.zeros(2, dtype=torch.float64))

    def bowl(model, batch):
        return model.weight.square().sum()

    refused("radius", lambda: sharpness(model, bowl, [None], radius=0.0))
    refused("steps", lambda: sharpness(model, bowl, [None], steps=0))
    refused("only zero weights", lambda: sharpness(model, bowl, [None], adaptive=True))
