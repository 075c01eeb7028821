"""Implicit methods against dense matrices: partial sums, solves, the ideal gradient, and a rival's mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.problems import example_weights
from oracles.quadratic import M, Quadratic
from oracles.unrolled import vector
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.implicit import largest_eigenvalue

EYE = torch.eye(M, dtype=torch.float64)
TIGHT = {"rtol": 1e-11, "atol": 1e-12}  # float64 sums of a few hundred products


def grad(case: Quadratic, method) -> Tensor:
    return hg.hypergradient(case.problem(), case.x, method).grad


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_hessian_free_is_a_number_in_place_of_the_inverse(scale: float) -> None:
    case = Quadratic()
    torch.testing.assert_close(grad(case, hg.HessianFree(scale=scale)), case.implicit(scale * EYE), **TIGHT)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_finite_difference_is_hessian_free_on_a_quadratic(scale: float) -> None:
    """The central difference of a linear slope is exact; rounding over 2ε with ε‖d‖ = 0.01 leaves 1e-13."""
    case = Quadratic()
    found = grad(case, hg.FiniteDifference(scale=scale))
    torch.testing.assert_close(found, case.implicit(scale * EYE), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_decay_that_depends_on_phi_counts_in_all_implicit_methods(scale: float) -> None:
    """Of L2 decay λ = φ: g = ∇(½‖θ − 1‖²) + φθ, so Y = θ_T and the hypergradient is −α d·θ_T."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - 1).square().sum() / 2, outer=lambda theta, phi: theta.square().sum(),
        init=torch.tensor([0.0, 0.5], dtype=torch.float64), steps=5,
        optimizer=hg.SGD(lr=0.1, weight_decay=lambda step, phi: phi),
    )  # fmt: skip
    phi = torch.tensor(0.1, dtype=torch.float64)
    end = hg.solve(problem, phi)
    for method in (hg.HessianFree(scale=scale), hg.FiniteDifference(scale=scale)):
        found = hg.hypergradient(problem, phi, method).grad
        torch.testing.assert_close(found, -scale * (2 * end @ end), **TIGHT)


def test_finite_difference_errs_with_the_square_of_its_radius() -> None:
    case = example_weights()
    exact = vector(hg.hypergradient(case.problem, case.phi, hg.HessianFree()).grad)
    errors = [
        (vector(hg.hypergradient(case.problem, case.phi, hg.FiniteDifference(radius=r)).grad) - exact).norm().item()
        for r in (0.1, 0.05)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("terms", [0, 1, 5])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_neumann_is_its_partial_sum(terms: int, decay: float) -> None:
    case, alpha = Quadratic(decay=decay), 0.5
    total = sum(torch.linalg.matrix_power(EYE - alpha * case.h, k) for k in range(terms + 1))
    torch.testing.assert_close(grad(case, hg.Neumann(step=alpha, terms=terms)), case.implicit(alpha * total), **TIGHT)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_conjugate_gradients_equal_a_dense_solve(damping: float, decay: float) -> None:
    case = Quadratic(decay=decay)
    inverse = torch.linalg.inv(case.h + damping * EYE)
    found = hg.hypergradient(case.problem(), case.x, hg.ConjugateGradient(terms=M, damping=damping))
    torch.testing.assert_close(found.grad, case.implicit(inverse), rtol=1e-8, atol=1e-9)
    assert found.report.residual < 1e-8


def test_the_released_solver_with_a_scaled_product_is_wrong_and_ours_is_not() -> None:
    """betty 0.2.1 takes its step length from α·Hp and updates the residual with Hp: right for α = 1 only."""
    case = Quadratic()

    def scaled_only_once(alpha: float) -> Tensor:
        x, r = torch.zeros(M, dtype=torch.float64), case.d.clone()
        p = r.clone()
        for _ in range(M):
            bent = case.h @ p
            step = (r @ r) / (alpha * p @ bent)
            x, after = x + step * p, r - step * bent
            p, r = after + (after @ after) / (r @ r) * p, after
        return alpha * x

    truth = torch.linalg.solve(case.h, case.d)
    torch.testing.assert_close(scaled_only_once(1.0), truth, rtol=1e-8, atol=1e-9)
    assert (scaled_only_once(0.1) - truth).norm() > truth.norm()
    ours = grad(case, hg.ConjugateGradient(terms=M, damping=0.0))
    torch.testing.assert_close(ours, -truth @ case.c + case.direct, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "method", [hg.Neumann(step=0.6, terms=300), hg.ConjugateGradient(terms=M, damping=0.0)], ids=str
)
def test_a_converged_run_has_the_gradient_of_the_ideal(method) -> None:
    """(1 − 0.4·0.2)^300 = 1e-11: the run and the series have both converged."""
    case = Quadratic(steps=300)
    torch.testing.assert_close(grad(case, method), case.ideal(), rtol=1e-7, atol=1e-8)


def test_a_run_that_has_not_converged_is_not_the_ideal() -> None:
    """The first term of the error split, d(Z + H⁻¹Y): no linear solver removes it."""
    case = Quadratic(steps=5)
    found = grad(case, hg.ConjugateGradient(terms=M, damping=0.0))
    exact = case.hypergradient()
    split = case.d @ (case.jacobian() + torch.linalg.solve(case.h, case.c))
    torch.testing.assert_close(exact - found, split, rtol=1e-8, atol=1e-8)
    assert split.norm() > 0.05 * exact.norm()


def test_a_step_beyond_two_over_the_largest_eigenvalue_is_refused() -> None:
    case = Quadratic(high=1.5)
    with pytest.raises(UserError, match=r"Neumann.step: got 1.4; the series diverges from 2/λ_max = 1.3\d* on; pass"):
        grad(case, hg.Neumann(step=1.4, terms=3, check=60))
    assert torch.isfinite(grad(case, hg.Neumann(step=1.4, terms=3, check=0))).all()


def test_power_iteration_finds_the_largest_eigenvalue_from_below() -> None:
    a = Quadratic().a
    found = [
        largest_eigenvalue(lambda v: [a @ v[0]], [torch.zeros(M, dtype=torch.float64)], rounds=r, seed=0)
        for r in (1, 5, 200)
    ]
    assert found[0] <= found[1] <= found[2]
    assert found[2] == pytest.approx(1.5, rel=1e-6)
    report = hg.hypergradient(Quadratic().problem(), Quadratic().x, hg.Neumann(step=0.5, check=200)).report
    assert report.curvature == pytest.approx(1.5, rel=1e-6)


def test_the_residual_of_neumann_is_measured() -> None:
    case, alpha = Quadratic(), 0.5
    found = hg.hypergradient(case.problem(), case.x, hg.Neumann(step=alpha, terms=4)).report.residual
    left = torch.linalg.matrix_power(EYE - alpha * case.h, 5) @ case.d  # I − H·α Σ_{k≤4} (I − αH)^k
    assert found == pytest.approx((left.norm() / case.d.norm()).item(), rel=1e-10)


def test_negative_curvature_stops_the_iteration_and_is_said() -> None:
    case = Quadratic(low=-1.0, high=-0.1, steps=2)
    with pytest.warns(RuntimeWarning, match="negative curvature"):
        found = hg.hypergradient(case.problem(), case.x, hg.ConjugateGradient(damping=0.0))
    assert torch.isfinite(found.grad).all()


IMPLICIT = [
    hg.HessianFree(),
    hg.Neumann(step=0.05, terms=3),
    hg.ConjugateGradient(terms=3, damping=5.0),
    hg.FiniteDifference(),
]


@pytest.mark.parametrize("method", IMPLICIT, ids=str)
def test_a_nonlinear_problem_follows_its_dense_hessian(method) -> None:
    case = example_weights()
    end = hg.solve(case.problem, case.phi)
    shapes = [(2, 3), (3,)]

    def inner(flat: Tensor, weight: Tensor) -> Tensor:
        parts = flat.split([6, 3])
        theta = {name: part.reshape(shape) for name, part, shape in zip(end, parts, shapes, strict=True)}
        return case.problem.inner(theta, {"weight": weight}, None)

    flat, weight = vector(end), case.phi["weight"]
    h = torch.autograd.functional.hessian(lambda t: inner(t, weight), flat)
    y = torch.func.jacrev(torch.func.grad(inner), argnums=1)(flat, weight)
    watched = {name: leaf.clone().requires_grad_() for name, leaf in end.items()}
    d = vector(torch.autograd.grad(case.problem.outer(watched, case.phi), list(watched.values())))
    eye = torch.eye(len(flat), dtype=torch.float64)
    if isinstance(method, hg.Neumann):
        x = d @ (0.05 * sum(torch.linalg.matrix_power(eye - 0.05 * h, k) for k in range(4)))
    elif isinstance(method, hg.ConjugateGradient):
        found = hg.hypergradient(case.problem, case.phi, dataclasses.replace(method, terms=30, damping=2.0)).grad
        expected = -torch.linalg.solve(h + 2 * eye, d) @ y + 0.2 * weight
        torch.testing.assert_close(found["weight"], expected, rtol=1e-7, atol=1e-8)
        return
    else:
        x = d
    found = hg.hypergradient(case.problem, case.phi, method).grad["weight"]
    # the difference of DARTS has an error of its own, of the order of its radius squared
    loose = 1e-4 if isinstance(method, hg.FiniteDifference) else 1e-10
    torch.testing.assert_close(found, -x @ y + 0.2 * weight, rtol=loose, atol=loose)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hg.Neumann(step=0.0), "Neumann.step: got 0.0"),
        (lambda: hg.Neumann(terms=-1), "Neumann.terms: got -1"),
        (lambda: hg.Neumann(check=2.5), "Neumann.check: got 2.5"),
        (lambda: hg.ConjugateGradient(terms=0), "ConjugateGradient.terms: got 0"),
        (lambda: hg.ConjugateGradient(terms=2.5), "ConjugateGradient.terms: got 2.5"),
        (lambda: hg.ConjugateGradient(damping=float("nan")), "ConjugateGradient.damping: got nan"),
        (lambda: hg.ConjugateGradient(damping=-1.0), "damping >= 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_a_move_of_the_weights_that_is_lost_in_rounding_is_refused() -> None:
    """Beside 1e6 float32 has steps of 0.06, and θ is moved by 0.01; d·Y is 1 by hand."""

    def problem(dtype: torch.dtype) -> hg.Bilevel:
        return hg.Bilevel(
            inner=lambda theta, phi, batch: (theta - 1e6 * phi).square().sum() / 2,
            outer=lambda theta, phi: (theta / 1e6).sum(),
            init=torch.full((4,), 1e6, dtype=dtype), optimizer=hg.SGD(lr=0.5), steps=3,
        )  # fmt: skip

    phi = torch.full((4,), 1.1)
    with pytest.raises(UserError, match=r"FiniteDifference.radius: got 0.01; θ of torch.float32 cannot hold a move"):
        hg.hypergradient(problem(torch.float32), phi, hg.FiniteDifference())
    for dtype, method in ((torch.float64, hg.FiniteDifference()), (torch.float32, hg.FiniteDifference(radius=1e4))):
        found = hg.hypergradient(problem(dtype), phi.to(dtype), method).grad
        torch.testing.assert_close(found, torch.ones(4, dtype=dtype), rtol=1e-4, atol=0)


class Decayed:
    """SGD with L2 decay 0.3, which tells of it in some way."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def start(self, theta: Any, phi: Any) -> Any:
        return ()

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return [w - 0.4 * (g + 0.3 * w) for w, g in zip(theta, grads, strict=True)], slots

    def coupled(self, theta: Any, step: int, phi: Any) -> Any:
        return self.tell([0.3 * weight for weight in theta])


@pytest.mark.parametrize(
    ("tell", "got"),
    [
        (lambda added: [added[0].sum()], r"shapes \[\(\)\]"),
        (lambda added: [], r"shapes \[\]"),
        (lambda added: added * 2, r"shapes \[\(5,\), \(5,\)\]"),
        (lambda added: added[0], "a Tensor"),
        (lambda added: {"z": added[0]}, "a dict"),
        (lambda added: [0.3], "a list"),
    ],
    ids=["scalar", "short", "long", "bare", "dict", "number"],
)
@pytest.mark.parametrize("method", [hg.ConjugateGradient(), hg.HessianFree(), hg.FiniteDifference()], ids=str)
def test_what_an_optimizer_adds_is_held_to_the_leaves_of_the_weights(method: Any, tell: Any, got: str) -> None:
    """A number for each leaf would be added to every element of it, and give a wrong gradient."""
    case = Quadratic(decay=0.3)
    right = case.problem(optimizer=Decayed(tuple))
    torch.testing.assert_close(hg.hypergradient(right, case.x, method).grad, grad(case, method), **TIGHT)
    runs: list[int] = []
    counted = case.problem(optimizer=Decayed(tell), batches=lambda step: runs.append(step))
    words = f"optimizer.coupled: got {got}; it is added to the inner gradient.*of shapes"
    with pytest.raises(UserError, match=words) as caught:
        hg.hypergradient(counted, case.x, method)
    assert "\n" not in str(caught.value)
    assert set(runs) <= {0, case.steps - 1}  # before the run
