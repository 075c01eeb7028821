import numpy as np
import pytest

from sparing.jobs.invert.equations import BURGERS, burgers
from sparing.jobs.invert.spectral import differentiation, points


def test_it_begins_at_the_initial_condition():
    x = points(64)
    assert np.abs(burgers(0.02, np.zeros(1), x)[0] - BURGERS.initial(x)).max() < 1e-14


@pytest.mark.parametrize("nu", [0.05, 0.2])
def test_it_satisfies_the_equation(nu):
    x, step, t = points(128), 1e-3, 0.4
    u = burgers(nu, np.array([t - step, t, t + step]), x)
    rate = (u[2] - u[0]) / (2 * step)  # error step²/6 · u_ttt, below 1e-3 here
    right = nu * differentiation(128, 2) @ u[1] - u[1] * (differentiation(128) @ u[1])
    assert np.abs(rate - right).max() < 1e-3


def test_the_shock_of_the_benchmark_has_its_known_slope():
    # Basdevant et al. 1986: at ν = 0.01/π the steepest slope at x = 0 is 152.00516 at t = 1.6037/π
    gap = 1e-6
    u = burgers(0.01 / np.pi, np.array([1.6037 / np.pi]), np.array([-gap, gap]))[0]
    assert (u[0] - u[1]) / (2 * gap) == pytest.approx(152.00516, rel=1e-6)
