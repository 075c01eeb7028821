import sys

import numpy as np
import pytest

from sparing.errors import RunError, UserError
from sparing.jobs.invert.equations import ALLEN_CAHN, BURGERS, EQUATIONS, KDV, burgers
from sparing.jobs.invert.solver import diffusion, integrator, rates, solve
from sparing.jobs.invert.spectral import points

TIMES = np.linspace(0, 1, 5)


def norm(u):
    return np.sqrt(np.mean(np.square(u)))


@pytest.mark.parametrize("nu", [0.05, 0.5])
def test_burgers_against_the_closed_form(nu):
    found = solve(BURGERS, nu, TIMES, grid=128)
    assert np.abs(found - burgers(nu, TIMES, points(128))).max() < 1e-6  # tolerance 1e-8 a step, over some 200 steps


def test_burgers_at_the_benchmark_coefficient():
    found, truth = solve(BURGERS, BURGERS.truth, TIMES, grid=512), burgers(BURGERS.truth, TIMES, points(512))
    assert norm(found - truth) / norm(truth) < 2e-4  # the shock is 6e-3 wide, the cells 4e-3


def test_burgers_stays_zero_at_the_edges():
    assert (
        np.abs(solve(BURGERS, 0.05, TIMES, grid=64)[:, 0]).max() < 1e-8
    )  # odd by symmetry; rounding in the implicit steps grows to 1e-10


@pytest.mark.parametrize(("equation", "grids"), [(ALLEN_CAHN, (48, 96, 192)), (KDV, (32, 48, 64))])
def test_refinement_in_space_converges(equation, grids):
    fine = 384 if equation.reacts else 192
    reference = solve(equation, equation.truth, TIMES, grid=fine, tolerance=1e-7)
    errors = [norm(solve(equation, equation.truth, TIMES, grid=n) - reference[:, :: fine // n]) for n in grids]
    assert errors[1] < errors[0] / 4
    assert errors[2] < errors[1] / 4


@pytest.mark.parametrize("name", EQUATIONS)
def test_refinement_in_tolerance_converges(name):
    equation, nu = EQUATIONS[name], 10 * EQUATIONS[name].truth
    reference = solve(equation, nu, TIMES, grid=48, tolerance=1e-11)
    rough, fine = (norm(solve(equation, nu, TIMES, grid=48, tolerance=t) - reference) for t in (1e-4, 1e-8))
    assert fine < rough / 100
    assert fine < 1e-6


def test_kdv_carries_a_soliton_around_the_circle():
    speed, nu, x = 1.0, 0.0025, points(96)
    wave = lambda t: 3 * speed / np.cosh(np.sqrt(speed / nu) / 2 * ((x - speed * t + 1) % 2 - 1)) ** 2  # noqa: E731
    found = solve(KDV, nu, TIMES, grid=96, initial=wave(0))
    assert np.abs(found - np.array([wave(t) for t in TIMES])).max() < 2e-5  # dealiasing 96 points cuts waves of 1e-6


def test_kdv_conserves_mass_and_energy():
    u = solve(KDV, KDV.truth, TIMES, grid=64)
    assert np.abs(u.mean(axis=1) - u[0].mean()).max() < 1e-10
    assert np.abs(np.square(u).mean(axis=1) / np.square(u[0]).mean() - 1).max() < 1e-6


def test_allen_cahn_from_a_constant_is_the_logistic_curve():
    found = solve(ALLEN_CAHN, 0.3, TIMES, grid=16, initial=np.full(16, 0.1))[:, 0]
    grown = 0.1 * np.exp(5 * TIMES)
    assert np.abs(found - grown / np.sqrt(1 + 0.01 * (np.exp(10 * TIMES) - 1))).max() < 1e-6


def test_allen_cahn_small_waves_grow_at_their_rate():
    small = 1e-6 * np.cos(np.pi * points(32))
    found = solve(ALLEN_CAHN, 0.2, TIMES, grid=32, initial=small, tolerance=1e-13)
    assert np.abs(found[-1] - small * np.exp(5 - 0.2 * np.pi**2)).max() < 1e-10  # cubic part: (4e-5)³


@pytest.mark.parametrize("equation", [BURGERS, ALLEN_CAHN])
def test_a_constant_field_is_a_number(equation):
    one, many = (solve(equation, nu, TIMES, grid=64) for nu in (0.05, np.full(64, 0.05)))
    assert np.abs(one - many).max() < 1e-6  # the same operator; tolerance 1e-8 a step


def test_a_field_against_a_manufactured_flux():
    # ∂x(ν u_x) with ν = 2 + cos πx, u = sin πx is −π²(2 sin πx + sin 2πx)
    x = points(64)
    found = diffusion(2 + np.cos(np.pi * x), 64) @ np.sin(np.pi * x)
    matrix = diffusion(2 + np.cos(np.pi * x), 64)
    assert np.abs(matrix - matrix.T).max() < 1e-10
    assert np.linalg.eigvalsh(matrix).max() < 1e-10
    assert np.abs(found + np.pi**2 * (2 * np.sin(np.pi * x) + np.sin(2 * np.pi * x))).max() < 1e-11


@pytest.mark.parametrize("equation", [BURGERS, ALLEN_CAHN])
@pytest.mark.parametrize("field", [False, True])
def test_the_jacobian_is_that_of_the_rate(equation, field):
    x = points(24)
    nu = 0.1 + 0.05 * np.cos(np.pi * x) if field else np.asarray(0.1)
    rate, jacobian = rates(equation, nu, 24)
    u, gap = np.sin(np.pi * x) + 0.2, 1e-6
    slow = np.stack([(rate(0, u + gap * e) - rate(0, u - gap * e)) / (2 * gap) for e in np.eye(24)], axis=1)
    assert np.abs(jacobian(0, u) - slow).max() < 1e-6


@pytest.mark.parametrize("nu", [0.0, -1.0, float("nan"), np.ones(5)])
def test_a_coefficient_that_is_none_is_refused(nu):
    with pytest.raises(UserError):
        solve(BURGERS, nu, TIMES, grid=16)


def test_kdv_takes_no_field():
    with pytest.raises(UserError, match="diffusion"):
        solve(KDV, np.ones(16), TIMES, grid=16)


def test_an_unresolved_shock_is_a_failed_run():
    with pytest.raises(RunError, match="finer grid"):
        solve(BURGERS, 1e-5, TIMES, grid=64)


def test_without_scipy_the_line_to_type_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    with pytest.raises(UserError, match="pip install"):
        integrator()
