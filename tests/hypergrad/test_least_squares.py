"""Least squares: minimizers against scipy's, exact tangents against closed forms, ranks, failures, refusals."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import HashStore

from oracles.quadratic import Quadratic
from oracles.unrolled import vector
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.fitting import columns, slopes
from sparing.hypergrad.fitting.gauss_newton import Fit, Iterate, prepared
from sparing.hypergrad.forward_mode.tangents import batched_jvp

optimize = pytest.importorskip("scipy.optimize")

X = torch.linspace(0, 3, 40, dtype=torch.float64)
SEEN = 2 * torch.exp(-1.3 * X) + 0.5 + 0.01 * torch.sin(40 * X)
GUESS = torch.ones(3, dtype=torch.float64)


def decay(p: Tensor) -> Tensor:
    return p[0] * torch.exp(-p[1] * X) + p[2]


def rosenbrock(p: Tensor) -> Tensor:
    return torch.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])


PLAIN = hg.Residuals(solve=decay, residuals=lambda u, p: u - SEEN)


def theirs(residuals: Any, guess: Tensor) -> np.ndarray:
    return optimize.least_squares(
        lambda p: residuals(torch.from_numpy(p)).numpy(), guess.numpy(), xtol=1e-14, ftol=1e-14, gtol=1e-14
    ).x


def test_the_minimizer_is_that_of_scipy() -> None:
    fit = hg.least_squares(PLAIN, GUESS, hg.GaussNewton(tolerance=1e-12))
    # the fall that is left at the end is 1e-12 of the sum of squares, so φ is within √1e-12 standard errors or so
    np.testing.assert_allclose(fit.phi, theirs(lambda p: decay(p) - SEEN, GUESS), rtol=1e-7)
    assert fit.converged


def test_a_bent_valley_is_followed_to_its_end() -> None:
    """Rosenbrock's function, from the usual guess: steps must be refused, and the residuals vanish."""
    problem = hg.Residuals(solve=rosenbrock, residuals=lambda u, p: u)
    fit = hg.least_squares(problem, torch.tensor([-1.2, 1.0], dtype=torch.float64))
    np.testing.assert_allclose(fit.phi, [1, 1], atol=1e-9)
    assert {row.taken for row in fit.path} == {True, False}
    assert fit.value < 1e-20
    assert math.isnan(fit.noise)
    values = [row.value for row in fit.path if row.taken]
    assert values == sorted(values, reverse=True)


def test_a_prior_is_more_rows_of_one_problem() -> None:
    rows = lambda p: torch.stack([p[0] - 1, p[1] * p[2]])  # noqa: E731
    problem = replace(PLAIN, prior=rows, penalty=0.7)
    fit = hg.least_squares(problem, GUESS, hg.GaussNewton(tolerance=1e-12))
    both = theirs(lambda p: torch.cat([decay(p) - SEEN, math.sqrt(0.7) * rows(p)]), GUESS)
    np.testing.assert_allclose(fit.phi, both, rtol=1e-6)


def test_covariance_and_interval_of_a_line_are_those_of_the_textbook() -> None:
    design = torch.stack([torch.ones_like(X), X], dim=1)
    aim = SEEN.clone()
    problem = hg.Residuals(solve=lambda p: {"u": design @ p["line"]}, residuals=lambda u, p: u["u"] - aim)
    fit = hg.least_squares(problem, {"line": torch.zeros(2, dtype=torch.float64)}, hg.GaussNewton(tolerance=1e-20))
    exact = torch.linalg.lstsq(design, aim[:, None]).solution[:, 0]
    variance = float((aim - design @ exact).square().sum()) / 38
    # differences of a linear solver are exact but for rounding over µ: 1e-16 / 1e-3
    torch.testing.assert_close(fit.phi["line"], exact, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fit.covariance, variance * torch.linalg.inv(design.T @ design), rtol=1e-8, atol=0)
    assert fit.freedom == pytest.approx(2, abs=1e-9)
    stats = pytest.importorskip("scipy.stats")
    half = stats.t.ppf(0.95, 38) * fit.covariance.diagonal().sqrt()
    low, high = fit.interval(0.9)
    torch.testing.assert_close(high["line"] - low["line"], 2 * half, rtol=1e-6, atol=0)
    known = hg.least_squares(replace(problem, noise=0.1), {"line": torch.zeros(2, dtype=torch.float64)})
    torch.testing.assert_close(known.covariance, 0.01 * torch.linalg.inv(design.T @ design), rtol=1e-8, atol=0)
    low, high = known.interval(0.95)
    torch.testing.assert_close(
        high["line"] - low["line"], 2 * 1.959964 * known.covariance.diagonal().sqrt(), rtol=1e-6, atol=0
    )


def test_columns_through_an_inner_run_are_exact_tangents() -> None:
    """θ_T of a quadratic run is linear in φ: its matrix, by forward mode, in chunks, and by differences."""
    case = Quadratic()
    problem = hg.Residuals(solve=case.problem(), residuals=lambda theta, phi: theta - 1)
    start = vector(hg.solve(case.problem(), case.x))
    units = torch.eye(case.x.numel(), dtype=torch.float64)
    dense = torch.stack([vector(hg.solve(case.problem(), case.x + unit)) - start for unit in units], dim=1)
    for method, rtol in (
        (hg.GaussNewton(), 1e-11),
        (hg.GaussNewton(chunk=2), 1e-11),
        (hg.GaussNewton(exact=False), 1e-9),
    ):
        jacobian = prepared(problem, case.x, method).begin().jacobian
        torch.testing.assert_close(jacobian, dense, rtol=rtol, atol=rtol)


def ranked(size: int, ranks: list[int], timeout: float = 60.0) -> list[Fit]:
    store = HashStore()

    def one(rank: int) -> Fit:
        spread = hg.Spread(store=store, rank=rank, size=size, timeout=timeout)
        return hg.least_squares(PLAIN, GUESS, hg.GaussNewton(spread=spread, chunk=2))

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward mode of torch has one level for all threads, and these ranks are threads."""
    lock = threading.Lock()

    def locked(*arguments: Any) -> Any:
        with lock:
            return batched_jvp(*arguments)

    for module in (columns, slopes):
        monkeypatch.setattr(module, "batched_jvp", locked)


@pytest.mark.usefixtures("one_at_a_time")
def test_any_number_of_ranks_gives_the_same_bits() -> None:
    alone = hg.least_squares(PLAIN, GUESS)
    for fit in (*ranked(2, [0, 1]), *ranked(4, [0, 1, 2, 3]), *ranked(3, [0, 2], timeout=0.05)):
        assert torch.equal(fit.phi, alone.phi)
        assert torch.equal(fit.jacobian, alone.jacobian)
        assert fit.solves == alone.solves


def test_a_search_goes_on_from_its_tree_to_the_same_bits() -> None:
    search = prepared(PLAIN, GUESS, hg.GaussNewton())
    at, other = search.begin(), None
    while not at.ended:
        at = search.advance(at)
        other = search.advance(Iterate.of((other or search.begin()).tree()))
    assert torch.equal(at.phi, other.phi)
    assert at.path == other.path


def test_where_the_solver_fails_the_step_is_made_again_shorter() -> None:
    def solve(p: Tensor) -> Tensor:
        return torch.log(p)

    problem = hg.Residuals(solve=solve, residuals=lambda u, p: u - math.log(0.1))
    # the first Gauss–Newton step leads from 4 to 4 − 4 log 40 < 0
    fit = hg.least_squares(problem, torch.tensor([4.0], dtype=torch.float64), hg.GaussNewton(damping=1e-8))
    assert fit.phi.item() == pytest.approx(0.1)
    assert not fit.path[0].taken


def test_a_fit_within_the_accuracy_of_its_solver_is_at_its_end() -> None:
    wanted = decay(torch.tensor([2.0, 1.3, 0.5], dtype=torch.float64))
    problem = hg.Residuals(solve=decay, residuals=lambda u, p: u - wanted, accuracy=1e-3)
    rough, fine = (hg.least_squares(replace(problem, accuracy=size), GUESS) for size in (1e-3, 0.0))
    assert rough.converged
    assert rough.solves < fine.solves
    assert rough.residuals.square().mean().sqrt() < 1e-3


def test_single_precision_keeps_its_dtype() -> None:
    seen, times = SEEN.float(), X.float()
    problem = hg.Residuals(solve=lambda p: p[0] * torch.exp(-p[1] * times) + p[2], residuals=lambda u, p: u - seen)
    fit = hg.least_squares(problem, GUESS.float(), hg.GaussNewton(step=1e-2))
    assert fit.phi.dtype == torch.float32
    torch.testing.assert_close(fit.phi, hg.least_squares(PLAIN, GUESS).phi.float(), rtol=1e-4, atol=0)


def test_a_direction_that_moves_nothing_has_no_covariance_and_is_named() -> None:
    flat = hg.Residuals(solve=lambda p: decay(p), residuals=lambda u, p: u - SEEN)
    with pytest.warns(RuntimeWarning, match="has no covariance"):
        fit = hg.least_squares(flat, torch.ones(4, dtype=torch.float64))
    assert fit.covariance.isnan().all()


def noisy() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda p: decay(p) + 1e-6 * torch.rand(40, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "phi", "method", "said"),
    [
        ({"solve": noisy()}, GUESS, {}, r"solve\(phi\): got other values when asked again"),
        ({"solve": lambda p: decay(p.mul_(1.0001))}, GUESS, {}, "changed in place"),
        ({"residuals": lambda u, p: u[:, None]}, GUESS, {}, "residuals: got torch.float64 of shape"),
        ({"residuals": lambda u, p: u.detach() - SEEN}, GUESS, {}, "values that no element of φ moves"),
        ({}, GUESS.bfloat16(), {}, "GaussNewton.step: got 0.001; φ of torch.bfloat16 cannot hold it"),
        ({"solve": lambda p: decay(p) + (p.sum() * 1e5).cos()}, GUESS, {}, "second differences of the runs"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused(changes: Any, phi: Tensor, method: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        hg.least_squares(replace(PLAIN, **changes), phi.clone(), hg.GaussNewton(**method))


def test_a_first_guess_outside_the_domain_and_a_column_beyond_its_edge_are_named() -> None:
    log = hg.Residuals(solve=torch.log, residuals=lambda u, p: u)
    with pytest.raises(UserError, match="not finite"):
        hg.least_squares(log, torch.tensor([-1.0], dtype=torch.float64))
    with pytest.raises(RunError, match="a column of the Jacobian is not finite"):
        hg.least_squares(log, torch.tensor([5e-4], dtype=torch.float64))


@pytest.mark.usefixtures("one_at_a_time")
def test_another_problem_on_another_rank_is_refused() -> None:
    store = HashStore()

    def one(rank: int) -> str:
        spread = hg.Spread(store=store, rank=rank, size=2)
        try:
            hg.least_squares(PLAIN, GUESS + rank, hg.GaussNewton(spread=spread))
        except (UserError, RunError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        assert any("another run on rank 1" in said for said in pool.map(one, [0, 1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"penalty": -1.0}, {"penalty": "gcv"}, {"penalty": math.inf}, {"penalty": math.nan}, {"noise": 0.0},
        {"noise": math.inf}, {"accuracy": -1.0}, {"accuracy": math.inf},
    ],
)  # fmt: skip
def test_settings_of_a_problem_that_cannot_be_are_refused(changes: Any) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        replace(PLAIN, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"iterations": 0}, {"iterations": 2.5}, {"tolerance": 0.0}, {"step": -1.0}, {"step": math.inf},
        {"damping": 0.0}, {"chunk": 0}, {"chunk": 2.5},
    ],
)  # fmt: skip
def test_settings_of_a_method_that_cannot_be_are_refused(changes: Any) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        hg.GaussNewton(**changes)


def test_a_step_to_where_nothing_can_be_differenced_is_made_again_shorter() -> None:
    """The first step leads from 0 to 5, where the solver is flat: the sum of squares falls, but the fit would end."""
    problem = hg.Residuals(solve=lambda p: p.clamp(max=3), residuals=lambda u, p: u - 5)
    search = prepared(problem, torch.zeros(1, dtype=torch.float64), hg.GaussNewton(damping=1e-6))
    at = search.advance(search.begin())
    assert at.phi.item() == 0
    assert not at.path[0].taken
    assert at.path[0].value == pytest.approx(4)
    while not at.ended:
        at = search.advance(at)
    assert 2 < at.phi.item() < 3


@pytest.mark.parametrize("where", ["residuals", "prior"])
@pytest.mark.parametrize("kind", ["torch", "own"])
def test_residuals_or_a_prior_that_draw_are_refused_and_the_generator_stays(where: str, kind: str) -> None:
    """A fit to noise ended as converged, with intervals of no width."""
    own = torch.Generator().manual_seed(0)
    noise = (lambda: torch.rand(3)) if kind == "torch" else (lambda: torch.rand(3, generator=own))
    drawn = {
        "residuals": lambda u, p: (u - SEEN) * (1 + 0.1 * noise()[0].double()),
        "prior": lambda p: p * (1 + 0.1 * noise().double()),
    }
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=f"{where}: got other values when asked again.*fix its randomness"):
        hg.least_squares(replace(PLAIN, **{where: drawn[where]}), GUESS)
    assert torch.equal(torch.get_rng_state(), before)


def test_residuals_of_another_length_on_the_second_call_are_refused() -> None:
    calls: list[int] = []
    growing = lambda u, p: (u - SEEN)[: 30 + (calls.append(1) or len(calls))]  # noqa: E731
    with pytest.raises(UserError, match="residuals: got other values when asked again"):
        hg.least_squares(replace(PLAIN, residuals=growing), GUESS)


def test_a_draw_without_effect_leaves_the_callers_generator_and_the_fit_as_they_are() -> None:
    before = torch.get_rng_state()
    fit = hg.least_squares(replace(PLAIN, residuals=lambda u, p: u - SEEN + 0 * torch.rand(()), penalty=0.0), GUESS)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(fit.phi, hg.least_squares(PLAIN, GUESS).phi)


CLASSES, SCORES = torch.tensor([0, 1, 2, 1]), torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
WRONG: dict[str, Any] = {
    "cross entropy": lambda u, p: F.cross_entropy(u, CLASSES, weight=p.exp(), reduction="none"),
    "its mean": lambda u, p: F.cross_entropy(u, CLASSES, weight=p.exp())[None],
    "nll": lambda u, p: F.nll_loss(u.log_softmax(1), CLASSES, weight=p.exp(), reduction="none"),
}
RIGHT: dict[str, Any] = {
    "by hand": lambda u, p: F.cross_entropy(u, CLASSES, reduction="none") * p.exp()[CLASSES],
    "constant weights": lambda u, p: F.cross_entropy(u, CLASSES, weight=SCORES[0].exp(), reduction="none") * p[0],
    "of shares": lambda u, p: F.cross_entropy(u, SCORES.softmax(1), weight=p.exp(), reduction="none"),
    # reverse mode has no derivative by this weight, or none inside no_grad, and forward mode has the right one
    "logits": lambda u, p: F.binary_cross_entropy_with_logits(u, SCORES.sigmoid(), pos_weight=p.exp()).reshape(1),
    "no_grad": torch.no_grad()(lambda u, p: (u * p.exp()).flatten()),
    "kinks": lambda u, p: (u * p).relu().flatten(),
}


def scored(residuals: Any) -> hg.Residuals:
    return hg.Residuals(solve=lambda p: SCORES * p, residuals=residuals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WRONG)
def test_class_weights_of_phi_are_refused_where_forward_mode_takes_them_for_constant(
    name: str, dtype: torch.dtype
) -> None:
    loss, phi = WRONG[name], torch.tensor([0.3, -0.2, 0.5], dtype=dtype)
    problem = scored(lambda u, p: loss(u.to(dtype), p))
    with pytest.raises(UserError, match="residuals: got slopes that torch's forward mode has wrong") as caught:
        hg.least_squares(problem, phi, hg.GaussNewton(step=1e-2))
    assert "\n" not in str(caught.value)
    line = hg.Residuals(solve=decay, residuals=lambda u, p: u - SEEN, prior=lambda p: loss(SCORES.to(dtype) * p, p))
    with pytest.raises(UserError, match="prior: got slopes that torch's forward mode has wrong"):
        hg.least_squares(line, phi.double() if dtype == torch.float64 else phi, hg.GaussNewton(step=1e-2))


@pytest.mark.parametrize("name", RIGHT)
def test_residuals_whose_forward_mode_is_right_have_the_jacobian_of_differences(name: str) -> None:
    phi = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    jacobian = prepared(scored(RIGHT[name]), phi, hg.GaussNewton(step=1e-5)).begin().jacobian
    rows = 1e-5 * torch.eye(3, dtype=torch.float64)
    value = lambda at: RIGHT[name](SCORES * at, at)  # noqa: E731
    wanted = torch.stack([(value(phi + row) - value(phi - row)) / 2e-5 for row in rows], dim=1)
    torch.testing.assert_close(jacobian, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("where", ["residuals", "prior"])
def test_what_forward_mode_cannot_do_is_named_and_no_method_of_hypergradient_is_advised(where: str) -> None:
    given: Any = {where: lambda *trees: torch.from_numpy(trees[0].numpy() * 2.0)}
    with pytest.raises(UserError, match=f"{where}: got .*without .numpy") as caught:
        hg.least_squares(replace(PLAIN, **given), GUESS)
    assert "Checkpointed" not in str(caught.value)


@pytest.mark.parametrize("method", [hg.Reverse(), hg.GaussNewton, 0], ids=["another", "a class", "a number"])
def test_a_method_other_than_gauss_newton_is_refused(method: Any) -> None:
    with pytest.raises(UserError, match=r"method: got (Reverse|GaussNewton|int); least squares has one method"):
        hg.least_squares(PLAIN, GUESS, method)
