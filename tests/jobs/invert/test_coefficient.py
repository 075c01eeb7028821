import numpy as np
import pytest
import torch

from sparing import hypergrad as hg
from sparing.jobs.invert.arms import black_box, numerical
from sparing.jobs.invert.coefficient import Coefficient
from sparing.jobs.invert.descent import covered
from sparing.jobs.invert.equations import BURGERS
from sparing.jobs.invert.observations import observe
from sparing.jobs.invert.settings import Numerical, Settings
from sparing.jobs.invert.solver import solve
from sparing.jobs.invert.spectral import interpolation


def small(**changes):
    return Settings(**{"equation": "burgers", "grid": 64, "seeds": (0,), "tolerance": 1e-10} | changes)


@pytest.mark.parametrize("parameter", ["log", "square"])
def test_guess_and_value_are_inverse(parameter):
    coefficient = Coefficient(size=0, grid=16, parameter=parameter)
    guesses = [coefficient.value(coefficient.guess(BURGERS, seed)).item() for seed in range(50)]
    assert 0 < min(guesses) < 2
    assert 8 < max(guesses) <= 10
    assert len(set(guesses)) == 50


@pytest.mark.parametrize("parameter", ["log", "square"])
def test_a_guess_of_a_field_is_constant(parameter):
    coefficient = Coefficient(size=16, grid=64, parameter=parameter)
    nu = coefficient.value(coefficient.guess(BURGERS, 3))
    assert nu.shape == (64,)
    assert (nu / nu[0] - 1).abs().max() < 1e-12
    assert 0.05 / 3 <= nu[0] <= 0.15
    assert coefficient.roughness(coefficient.guess(BURGERS, 3)) < 1e-20


def test_roughness_of_a_wave():
    coefficient, x = Coefficient(size=32, grid=64), -1 + torch.arange(32, dtype=torch.float64) / 16
    p = 0.7 * torch.sin(2 * torch.pi * x)
    assert coefficient.roughness(p).item() == pytest.approx(0.7**2 * (2 * np.pi) ** 2 / 2)


ORTHONORMAL = Numerical(law="orthonormal", directions=8, probe=1e-4)


@pytest.mark.parametrize("parameter", ["log", "square"])
def test_the_chain_rule_is_applied_once(parameter):
    """The released code perturbs p, so that its difference is du/dp, and multiplies by dν/dp = 2p again."""
    settings = small(parameter=parameter, numerical=Numerical(probe=1e-4))
    inputs, nu, gap = observe(settings), 0.08, 1e-4
    p = torch.tensor([np.log(nu) if parameter == "log" else np.sqrt(nu)], dtype=torch.float64)
    result = hg.hypergradient(black_box(settings, inputs), {"p": p}, numerical(settings, inputs).method, seed=0)

    def loss(value):
        u = solve(BURGERS, value, inputs.times, grid=64, tolerance=1e-10) @ interpolation(64, inputs.where).T
        return float(np.mean((u - inputs.values.numpy()) ** 2))

    slope = (loss(nu + gap * nu) - loss(nu - gap * nu)) / (2 * gap * nu)
    once = nu if parameter == "log" else 2 * np.sqrt(nu)
    assert result.grad["p"].item() == pytest.approx(slope * once, rel=1e-4)  # both differences are O(gap²)
    assert result.value.item() == pytest.approx(loss(nu), rel=1e-9)


def test_a_whole_frame_gives_the_gradient_of_a_field():
    settings = small(field=8, observe=(4, 8), penalty=1e-3, numerical=ORTHONORMAL)
    inputs = observe(settings)
    arm, problem = numerical(settings, inputs), black_box(settings, inputs)
    p = arm.coefficient.guess(BURGERS, 0) + 0.2 * torch.sin(torch.arange(8, dtype=torch.float64))
    found = hg.hypergradient(problem, {"p": p}, arm.method, seed=0).grad["p"]

    def loss(p):
        return problem.outer(problem.solve({"p": p}), {"p": p}).item()

    slow = torch.tensor([(loss(p + 1e-4 * e) - loss(p - 1e-4 * e)) / 2e-4 for e in torch.eye(8, dtype=p.dtype)])
    assert (found - slow).norm() / slow.norm() < 1e-4


def test_the_loss_is_the_mean_of_the_squares_not_the_square_of_the_mean():
    """The released code logs mean(error)²."""
    settings = small()
    inputs = observe(settings)
    off = torch.ones_like(inputs.values)
    off[::2] = -1
    phi = {"p": torch.zeros(1, dtype=torch.float64)}
    assert black_box(settings, inputs).outer(inputs.values + off, phi).item() == pytest.approx(1)


@pytest.mark.parametrize("parameter", ["log", "square"])
@pytest.mark.parametrize(("p", "half"), [(0.05, 0.16), (-0.05, 0.16), (0.5, 0.02), (-0.5, 0.02)])
def test_a_band_is_the_range_of_nu_over_the_interval_of_p(parameter, p, half):
    coefficient = Coefficient(size=0, grid=64, parameter=parameter)
    inside = torch.linspace(p - half, p + half, 100_001, dtype=torch.float64)
    nu = inside.exp() if parameter == "log" else inside.square()
    low, high = coefficient.band(torch.tensor([p]).double(), torch.tensor([[(half / 2) ** 2]]).double(), 2.0)
    torch.testing.assert_close((low, high), (nu.min(), nu.max()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_truth_is_covered_whatever_the_sign_of_p(sign):
    settings, root = Settings(parameter="square"), BURGERS.truth**0.5
    ends = sorted([sign * 0.9 * root, sign * 1.1 * root])
    held = {name: torch.tensor([end]).double() for name, end in zip(("low", "high"), ends, strict=True)}
    assert covered(settings, held) == 1.0
    assert covered(settings, {name: 2 * end for name, end in held.items()}) == 0.0
