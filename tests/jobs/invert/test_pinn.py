import numpy as np
import pytest
import torch

from sparing import hypergrad as hg
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.reverse import Reverse
from sparing.jobs.invert import pinn
from sparing.jobs.invert.coefficient import Coefficient
from sparing.jobs.invert.equations import EQUATIONS
from sparing.jobs.invert.observations import observe
from sparing.jobs.invert.settings import Pinn, Settings
from sparing.jobs.invert.spectral import points
from sparing.seeds import stream

SHAPE = Pinn(depth=3, width=6, steps=3, batch=5, lr=0.05)


@pytest.fixture
def theta():
    return pinn.weights(SHAPE, stream(0, "test"))


@pytest.fixture
def where():
    drawn = torch.rand(2, 7, generator=stream(1, "test"), dtype=torch.float64)
    return 2 * drawn[0] - 1, drawn[1]


def by_autograd(equation, theta, nu, x, t):
    """The residual by repeated reverse mode, another way than the one under test."""
    x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
    slope = lambda y, z: torch.autograd.grad(y.sum(), z, create_graph=True)[0]  # noqa: E731
    u = pinn.predict(equation, theta, x, t)
    u_x = slope(u, x)
    u_xx = slope(u_x, x)
    if equation.name == "burgers":
        return slope(u, t) + u * u_x - nu * u_xx
    if equation.name == "kdv":
        return slope(u, t) + u * u_x + nu * slope(u_xx, x)
    return slope(u, t) - nu * u_xx - 5 * (u - u**3)


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_residual_is_that_of_the_equation(name, theta, where):
    nu = torch.tensor(0.3, dtype=torch.float64)
    found = pinn.residual(EQUATIONS[name], theta, nu, *where)
    assert (found - by_autograd(EQUATIONS[name], theta, nu, *where)).abs().max() < 1e-11


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_initial_condition_holds_whatever_the_weights(name, theta):
    x = torch.from_numpy(points(32))
    u = pinn.predict(EQUATIONS[name], theta, x, torch.zeros_like(x))
    assert np.abs(u.numpy() - EQUATIONS[name].initial(points(32))).max() < 1e-15


@pytest.mark.parametrize("name", EQUATIONS)
def test_one_direction_is_exact_for_one_number(name, theta):
    settings = Settings(equation=name, method="pinn", pinn=SHAPE, grid=32, observe=(2, 4), tolerance=1e-6)
    inputs, p = observe(settings), torch.tensor([-2.0], dtype=torch.float64)
    problem = pinn.bilevel(settings, inputs, Coefficient(size=0, grid=32), theta)
    forward, reverse = (
        hg.hypergradient(problem, {"p": p}, m, seed=0) for m in (ForwardGradient(directions=1), Reverse())
    )
    assert forward.grad["p"].item() == pytest.approx(reverse.grad["p"].item(), rel=1e-9)
    assert forward.value.item() == reverse.value.item()


def test_edges_measure_the_breach(theta):
    t = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    left, right = (pinn.predict(EQUATIONS["kdv"], theta, torch.full_like(t, s), t) for s in (-1.0, 1.0))
    assert pinn.edges(EQUATIONS["kdv"], theta, t).item() == pytest.approx((left - right).square().mean().item())
    held = {name: weight * 0 for name, weight in theta.items()}
    assert pinn.edges(EQUATIONS["allen-cahn"], held, t).item() == pytest.approx(0, abs=1e-30)  # û = u_0 = −1 there


def test_evaluation_is_the_prediction(theta):
    u = pinn.evaluate(EQUATIONS["kdv"], theta, np.array([0.0, 0.5]), 16)
    x = torch.from_numpy(points(16))
    assert np.allclose(u[1], pinn.predict(EQUATIONS["kdv"], theta, x, torch.full_like(x, 0.5)).numpy(), rtol=0, atol=0)
