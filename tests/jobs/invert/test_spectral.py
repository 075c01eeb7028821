import numpy as np
import pytest

from sparing.errors import UserError
from sparing.jobs.invert.spectral import differentiation, interpolation, points


def test_the_periodic_endpoint_is_kept_once():
    x = points(64)
    assert x[0] == -1
    assert x[-1] == 1 - 2 / 64
    assert len(set(x.tolist())) == 64


@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_of_waves_are_exact(order):
    x = points(32)
    wave = np.exp(np.sin(np.pi * x))  # analytic: 32 points resolve it to 1e-9
    fine = points(512)
    truth = differentiation(512, order) @ np.exp(np.sin(np.pi * fine))
    scale = np.abs(truth).max()
    assert np.abs(differentiation(32, order) @ wave - truth[::16]).max() < 1e-8 * scale


def test_first_derivative_against_the_formula():
    x = points(48)
    slope = differentiation(48) @ np.sin(3 * np.pi * x)
    assert np.abs(slope - 3 * np.pi * np.cos(3 * np.pi * x)).max() < 1e-11  # rounding × condition (count)


def test_interpolation_at_grid_points_picks_them():
    assert np.abs(interpolation(16, points(16)) - np.eye(16)).max() < 1e-14


def test_interpolation_reproduces_a_polynomial_of_waves():
    where = np.linspace(-1, 1, 37)
    wave = lambda x: 0.3 + np.cos(5 * np.pi * x) - 2 * np.sin(2 * np.pi * x)  # noqa: E731
    assert np.abs(interpolation(16, where) @ wave(points(16)) - wave(where)).max() < 1e-13


@pytest.mark.parametrize("count", [7, 15, 6])
def test_a_grid_that_is_none_is_refused(count):
    with pytest.raises(UserError, match="even"):
        points(count)
