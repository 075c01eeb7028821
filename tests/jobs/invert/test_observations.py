import numpy as np
import pytest

from sparing.jobs.invert.differences import differenced
from sparing.jobs.invert.equations import ALLEN_CAHN, BURGERS, KDV, burgers
from sparing.jobs.invert.observations import midpoints, observe, reference, relative, true_field
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.solver import solve
from sparing.jobs.invert.spectral import points


def test_observations_lie_inside_and_no_place_is_seen_twice():
    where, times = midpoints(8, -1, 1), midpoints(8, 0, 1)
    assert len({round((x + 1) % 2, 12) for x in where}) == 8  # modulo the period
    assert -1 < where.min() < where.max() < 1
    assert 0 < times.min() < times.max() < 1


def test_burgers_is_observed_in_closed_form():
    inputs = observe(Settings(equation="burgers", grid=32))
    assert inputs.values.shape == (8, 8)
    assert inputs.solution.shape == (512, 32)
    assert np.abs(inputs.values.numpy() - burgers(0.01 / np.pi, inputs.times, inputs.where)).max() < 1e-12
    assert np.abs(inputs.solution - burgers(0.01 / np.pi, inputs.grid_times, points(32))).max() < 1e-12


def test_rows_are_those_of_their_times():
    inputs = observe(Settings(equation="allen-cahn", grid=64, observe=(3, 4)))
    again = reference(ALLEN_CAHN, field=False, times=inputs.times, where=inputs.where, grid=64)
    assert np.abs(inputs.values.numpy() - again).max() < 1e-7  # tolerance 1e-10 a step, other stops on the way


@pytest.mark.parametrize("equation", [BURGERS, ALLEN_CAHN, KDV], ids=lambda one: one.name)
def test_the_second_discretization_agrees_with_the_spectral_solver(equation):
    """Its error falls with the fourth power of the spacing, down to that of the corner of Allen–Cahn's start."""
    times, where, field = np.linspace(0.2, 0.5, 4), points(64), not equation.dispersive

    def nu(at):
        return true_field(equation, at) if field else np.full_like(at, equation.truth)

    spectral = solve(equation, nu(points(256)) if field else equation.truth, times, grid=256, tolerance=1e-10)[:, ::4]
    coarse, fine = (np.abs(differenced(equation, nu, times, where, grid=grid) - spectral).max() for grid in (64, 128))
    # measured 4e-4, 2.4e-5 and less than 1e-5: solitons need the most points, the corner stays in both discretizations
    assert fine < {"kdv": 8e-4, "allen-cahn": 5e-5, "burgers": 1e-5}[equation.name]
    # 16 but for that corner
    assert equation.reacts or coarse / fine > 12


def test_draws_of_noise_differ():
    one, two = (observe(Settings(equation="burgers", grid=16, noise=0.1, draw=draw)).values for draw in (0, 1))
    assert (one != two).all()


def test_noise_has_the_deviation_asked_for_and_repeats():
    clean, noisy, again = (
        observe(Settings(equation="burgers", grid=16, observe=(64, 64), noise=n)).values for n in (0, 0.1, 0.1)
    )
    assert (noisy == again).all()
    assert (noisy - clean).std().item() == pytest.approx(0.1, rel=0.05)  # 4096 draws: 1 % standard error


def test_relative_error():
    assert relative(np.array(1.5), np.array(1.0)) == 0.5
    assert relative(np.array([3.0, 4.0]), np.array([0.0, 4.0])) == 0.75
