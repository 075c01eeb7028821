"""The linearized problem: weights of a prior by dense likelihoods, freedom, covariance, Student's law, coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracles.quadratic import random
from sparing.errors import RunError, UserError
from sparing.hypergrad.fitting.linear import Linear, student

M, N = 40, 9
COLUMNS = torch.linspace(0, -6, N, dtype=torch.float64)
SLOPES = torch.diff(torch.eye(N, dtype=torch.float64), dim=0)  # a random walk: constants are free


def case(noise: float | None = None, seed: int = 0, sigma: float = 0.1) -> tuple[Linear, Tensor]:
    """A problem linearized at its truth, with columns that shrink by e⁶, and the truth: one walk of unit steps."""
    jacobian = random(M, N, seed=1) * COLUMNS.exp()
    truth = random(N, seed=100 + seed).cumsum(0)
    residuals = -sigma * random(M, seed=200 + seed)
    return Linear(residuals=residuals, jacobian=jacobian, prior=SLOPES @ truth, slopes=SLOPES, noise=noise), truth


def dense(problem: Linear, weight: float, sigma: float | None) -> float:
    """−2 log of the marginal likelihood of J·φ₀ − r by its (m, m) covariance, φ's constant integrated out."""
    # φ = c·1 + L z with increments z: J φ has the columns J·1, which are projected out, and J L
    walk = torch.tril(torch.ones(N, N, dtype=torch.float64))[:, 1:]
    basis = torch.linalg.qr((problem.jacobian @ torch.ones(N, dtype=torch.float64))[:, None], mode="complete").Q[:, 1:]
    # the data relative to the truth, so the prior mean of the increments is −S φ
    data = basis.T @ (-problem.residuals - problem.jacobian @ (walk @ -problem.prior))
    spread = (
        torch.eye(M - 1, dtype=torch.float64)
        + basis.T @ problem.jacobian @ walk @ (basis.T @ problem.jacobian @ walk).T / weight
    )
    fit = float(data @ torch.linalg.solve(spread, data))
    logdet = float(torch.linalg.slogdet(spread)[1])
    return (M - 1) * math.log(fit) + logdet if sigma is None else fit / sigma**2 + logdet


@pytest.mark.parametrize("sigma", [None, 0.1])
def test_the_evidence_is_the_marginal_likelihood_by_dense_matrices(sigma: float | None) -> None:
    for seed in range(3):
        problem, _ = case(sigma, seed)
        weight = problem.choose("evidence")
        here, above, below = (dense(problem, weight * factor, sigma) for factor in (1, 1.06, 1 / 1.06))
        # the grid of weights is 0.6 % fine
        assert here < min(above, below)
        whole = min(dense(problem, 10.0 ** (power / 10), sigma) for power in range(-80, 81))
        assert here <= whole + 1e-6


def test_the_discrepancy_leaves_what_the_noise_would_in_the_range_of_the_columns() -> None:
    problem, _ = case(0.1)
    step, _ = problem.step(problem.choose("discrepancy"), 1e-14)
    basis = torch.linalg.qr(problem.jacobian).Q
    left = basis.T @ (problem.residuals + problem.jacobian @ step)
    assert float(left.square().sum()) == pytest.approx(N * 0.01, rel=1e-6)
    unknown = replace(problem, noise=None)
    outside = problem.residuals - basis @ (basis.T @ problem.residuals)
    assert unknown.unreached() == pytest.approx(float(outside.square().sum()) / (M - N))
    assert unknown.choose("discrepancy") > 0


def test_with_fewer_residuals_than_unknowns_the_discrepancy_is_that_of_the_residuals() -> None:
    """Twenty residuals of two hundred unknowns, which could fit them exactly: their noise is left, not tenfold."""
    rows, unknowns, sigma = 20, 200, 0.1
    jacobian = random(rows, unknowns, seed=1) / math.sqrt(unknowns)
    slopes = torch.diff(torch.eye(unknowns, dtype=torch.float64), dim=0)
    truth = random(unknowns, seed=2).cumsum(0)
    problem = Linear(
        residuals=-jacobian @ truth - sigma * random(rows, seed=3), jacobian=jacobian,
        prior=torch.zeros(unknowns - 1, dtype=torch.float64),
        slopes=slopes, noise=sigma,
    )  # fmt: skip
    step, _ = problem.step(problem.choose("discrepancy"), 1e-14)
    left = float((problem.residuals + jacobian @ step).square().sum())
    # the grid of weights is 0.6 % fine, and the misfit grows at most with the square of the weight
    assert 0.98 * rows * sigma**2 <= left <= 1.001 * rows * sigma**2


def test_freedom_and_covariance_are_traces_and_inverses() -> None:
    problem, _ = case()
    data, prior = problem.jacobian.T @ problem.jacobian, problem.slopes.T @ problem.slopes
    inverse = torch.linalg.inv(data + 0.3 * prior)
    assert problem.freedom(0.3) == pytest.approx(float((inverse @ data).trace()), rel=1e-9)
    torch.testing.assert_close(problem.covariance(0.3, 2.0), 4 * inverse, rtol=1e-8, atol=1e-10)
    # between nothing but the free constant, and all unknowns
    assert problem.freedom(1e12) == pytest.approx(1, abs=1e-6)
    assert problem.freedom(0.0) == pytest.approx(N, abs=1e-9)


def test_a_step_solves_the_damped_normal_equations() -> None:
    problem, _ = case()
    matrix, vector = problem.stacked(0.3)
    normal = matrix.T @ matrix + 0.2 * torch.eye(N, dtype=torch.float64)
    step, fall = problem.step(0.3, 0.2)
    torch.testing.assert_close(step, -torch.linalg.solve(normal, matrix.T @ vector), rtol=1e-9, atol=1e-11)
    assert fall == pytest.approx(float(vector.square().sum() - (vector + matrix @ step).square().sum()), rel=1e-9)
    assert torch.equal(problem.step(0.3, 0.2)[0], step)


def test_intervals_cover_in_the_mean_where_the_truth_is_of_the_prior() -> None:
    """200 walks of 9 places: 90 % within three standard errors of about 1.2 %."""
    held = []
    for seed in range(200):
        problem, _ = case(0.1, seed)
        step, _ = problem.step(0.01, 1e-14)  # σ² over the variance of the steps
        deviation = problem.covariance(0.01, 0.1).diagonal().sqrt()
        held.append(float((step.abs() <= student(0.95, math.inf) * deviation).double().mean()))
    mean, error = sum(held) / 200, float(torch.tensor(held).std()) / 200**0.5
    assert mean == pytest.approx(0.9, abs=3 * error)
    assert error < 0.015


def test_what_nothing_decides_is_refused() -> None:
    flat = Linear(residuals=torch.ones(4).double(), jacobian=torch.zeros(4, 2).double(), prior=torch.zeros(0).double(),
                  slopes=torch.zeros(0, 2).double())  # fmt: skip
    assert not flat.determined(0.0)
    with pytest.raises(RunError, match="moves neither the residuals nor the prior"):
        flat.choose("evidence")
    wide, _ = case()
    few = Linear(residuals=wide.residuals[:5], jacobian=wide.jacobian[:5], prior=wide.prior, slopes=wide.slopes)
    with pytest.raises(UserError, match="noise: got none for 5 residuals of 9 unknowns"):
        few.choose("discrepancy")
    assert few.choose("evidence") > 0


@pytest.mark.parametrize("freedom", [1, 2, 3.5, 10, 200, 5000])
@pytest.mark.parametrize("tail", [0.6, 0.95, 0.995])
def test_quantiles_are_those_of_students_law(freedom: float, tail: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    # a trapezoid rule of 20,000 nodes, and a straight line between two of them
    assert student(tail, freedom) == pytest.approx(stats.t.ppf(tail, freedom), rel=1e-4)
    assert student(tail, math.inf) == pytest.approx(stats.norm.ppf(tail), rel=1e-12)
