"""Forward gradients: exact weights, the stated errors, tails, masks, growth, and released mistakes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.problems import bottleneck, dropout, example_weights, explicit_only, minibatches
from oracles.quadratic import N, Quadratic, random
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.forward_mode.sampled import draw_directions
from sparing.seeds import number

LAWS: list[Any] = [hg.Rademacher(), hg.Gaussian(), hg.Sphere(), hg.Coordinate(), hg.Orthonormal(), hg.Hadamard()]
SHORT = Quadratic(steps=1)


def name(law: object) -> str:
    return type(law).__name__


def sampled(case: Quadratic, method: Any, draws: int) -> Tensor:
    """Estimates under many seeds, shape (draws, N)."""
    problem = case.problem()
    return torch.stack([hg.hypergradient(problem, case.x, method, seed=seed).grad for seed in range(draws)])


def within(squares: Tensor, theory: Tensor | float) -> None:
    """Three standard errors of the mean."""
    assert abs(squares.mean() - theory) <= 3 * squares.std() / math.sqrt(len(squares))


@pytest.mark.parametrize("start", [lambda phi: phi, lambda phi: {"student": phi, "teacher": phi}], ids=["phi", "twice"])
@pytest.mark.parametrize("width", [1, 2, None])
def test_weights_that_start_at_phi_do_not_share_memory_with_the_directions(start: Any, width: int | None) -> None:
    """Tangents of such a start are the directions themselves, and pieces of a width are overwritten in place."""
    phi = random(4, seed=3)

    def inner(theta: Any, phi: Tensor, batch: Any) -> Tensor:
        parts = list(theta.values()) if isinstance(theta, dict) else [theta]
        return sum(
            ((part - place).square().sum() / 2 for place, part in enumerate(parts, 1)), (parts[0] - phi).square().sum()
        )

    def outer(theta: Any, phi: Tensor) -> Tensor:
        return sum(part.pow(2).sum() for part in theta.values()) if isinstance(theta, dict) else theta.pow(2).sum()

    problem = hg.Bilevel(inner=inner, outer=outer, init=start, optimizer=hg.SGD(lr=0.1), steps=6)
    method = hg.ForwardGradient(directions=4, law=hg.Orthonormal(), width=width)  # as many as unknowns: exact
    truth = hg.hypergradient(problem, phi, hg.Reverse()).grad
    torch.testing.assert_close(hg.hypergradient(problem, phi, method).grad, truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=name)
def test_weights_are_the_derivatives_along_the_directions(law: Any) -> None:
    case = Quadratic(momentum=0.9)
    found = hg.hypergradient(case.problem(), case.x, hg.ForwardGradient(directions=5, law=law), seed=4)
    rows = draw_directions(law, 5, case.x, number(4, "directions")).rows(range(5))
    sloped = case.hypergradient() - case.direct
    torch.testing.assert_close(found.report.weights, rows @ sloped, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.grad, rows.T @ rows @ sloped / 5 + case.direct, rtol=1e-11, atol=1e-12)
    assert found.report.directions == 5
    assert found.report.norm_squared == pytest.approx((rows @ sloped).square().mean().item(), rel=1e-10)


@pytest.mark.parametrize(
    ("law", "excess"),
    [
        (hg.Rademacher(), (N - 1) / 3),
        (hg.Orthonormal(), N / 3 - 1),
        (hg.Hadamard(), (N - 1) / 3 * (8 - 3) / (8 - 1)),
    ],
    ids=["Rademacher", "Orthonormal", "Hadamard"],
)
def test_the_relative_error_is_the_formula_of_the_law(law: Any, excess: float) -> None:
    truth = SHORT.hypergradient()
    errors = (sampled(SHORT, hg.ForwardGradient(directions=3, law=law), 100) - truth).square().sum(1)
    within(errors, excess * (truth - SHORT.direct).square().sum())


def test_the_mean_of_many_directions_is_the_hypergradient() -> None:
    """z-test per coordinate: Rademacher directions give (‖g‖² − g_j²)/b."""
    draws = 2000
    found = hg.hypergradient(SHORT.problem(), SHORT.x, hg.ForwardGradient(directions=draws), seed=1)
    truth = SHORT.hypergradient()
    g = truth - SHORT.direct
    error = ((g.square().sum() - g.square()) / draws).sqrt()
    assert ((found.grad - truth).abs() <= 3 * error).all()
    assert found.report.norm_squared == pytest.approx(g.square().sum().item(), rel=3 * math.sqrt(2 / draws))
    low, high = found.report.norm_squared_interval
    assert low <= g.square().sum() <= high


def test_a_reversed_tail_leaves_the_error_of_the_head() -> None:
    """(N − 1)/b·‖∇h − c_{T−s}‖² with c_{T−s} what truncation after s steps would return."""
    case, tail = Quadratic(steps=4), 3
    truth = case.hypergradient()
    errors = (sampled(case, hg.ForwardGradient(directions=2, tail=tail), 80) - truth).square().sum(1)
    within(errors, (N - 1) / 2 * (truth - case.hypergradient(tail)).square().sum())


def test_the_explicit_part_is_exact_and_not_sampled() -> None:
    case = explicit_only()
    found = hg.hypergradient(case.problem, case.phi, hg.ForwardGradient(directions=1))
    torch.testing.assert_close(found.grad["weight"], 2 * case.phi["weight"], rtol=1e-14, atol=0)


@pytest.mark.parametrize("settings", [{"chunk": 1}, {"chunk": 3}, {"width": 1}, {"width": 2}, {"chunk": 4, "width": 3}])
@pytest.mark.parametrize("make", [dropout, minibatches])
def test_chunks_and_widths_change_nothing(make: Any, settings: dict[str, int]) -> None:
    """Nor do they draw other masks or batches; products of other widths round apart by 1e-16."""
    case = make()
    whole, parts = (
        hg.hypergradient(case.problem, case.phi, hg.ForwardGradient(directions=5, tail=1, **extra), seed=2)
        for extra in ({}, settings)
    )
    torch.testing.assert_close(vector(parts.grad), vector(whole.grad), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.report.weights, whole.report.weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.report.growth, whole.report.growth, rtol=1e-12, atol=1e-14)
    assert torch.equal(parts.value, whole.value)


def test_a_mean_of_chunk_means_or_a_rounded_count_is_wrong() -> None:
    """The released code averages chunk means: with b = 5 in chunks of 2 the short last chunk weighs double."""
    rows = draw_directions(hg.Rademacher(), 5, SHORT.x, number(3, "directions")).rows(range(5))
    products = (rows @ (SHORT.hypergradient() - SHORT.direct))[:, None] * rows
    released = torch.stack([part.mean(0) for part in products.split(2)]).mean(0) + SHORT.direct
    found = hg.hypergradient(SHORT.problem(), SHORT.x, hg.ForwardGradient(directions=5, chunk=2), seed=3).grad
    torch.testing.assert_close(found, products.mean(0) + SHORT.direct, rtol=1e-12, atol=1e-13)
    assert (released - found).norm() > 0.05 * found.norm()


def test_a_product_of_a_difference_with_the_inner_derivative_is_the_chain_rule_once() -> None:
    """The released PDE code perturbs p of ν = p², which measures dh/dp, and multiplies by 2p again."""
    p = torch.tensor([0.3], dtype=torch.float64)
    field = random(3, seed=8).abs()
    problem = hg.BlackBox(solve=lambda at: torch.exp(-field * at.square()), outer=lambda u, _: u.square().sum())
    truth = torch.autograd.functional.jacobian(lambda at: problem.outer(problem.solve(at), at), p)
    found = hg.hypergradient(problem, p, hg.ZerothOrder(directions=1, step=1e-5)).grad
    torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-10)
    assert (found * 2 * p - truth).abs() > 0.3 * truth.abs()


def test_a_sum_of_chunk_means_in_the_inner_loss_is_too_large() -> None:
    """The released implicit baseline adds a mean per chunk of the synthetic set: its slopes are N/chunk too large."""
    case, chunk = example_weights(), 2

    def released(theta: Any, phi: Any, batch: Any) -> Tensor:
        parts = (slice(low, low + chunk) for low in range(0, 6, chunk))
        return sum(case.problem.inner(theta, {"weight": torch.where(mask(part), phi["weight"], -1e9)}, None) * 3
                   for part in parts)  # fmt: skip

    def mask(part: slice) -> Tensor:
        inside = torch.zeros(6, dtype=torch.bool)
        inside[part] = True
        return inside

    theta = hg.solve(case.problem, case.phi)
    right, wrong = (g(theta, case.phi, None).item() for g in (case.problem.inner, released))
    assert wrong / right == pytest.approx(6 / chunk, rel=1e-12)
    found = hg.hypergradient(case.problem, case.phi, hg.HessianFree()).grad["weight"] - 0.2 * case.phi["weight"]
    swollen = dataclasses.replace(case.problem, inner=released, batches=None, steps=case.problem.steps)
    # at the same θ_T the implicit part is 3 times what it should be
    at_end = {"init": theta, "optimizer": hg.SGD(lr=0.0), "steps": 1}
    parts = [
        hg.hypergradient(dataclasses.replace(one, **at_end), case.phi, hg.HessianFree()).grad["weight"]
        - 0.2 * case.phi["weight"]
        for one in (case.problem, swollen)
    ]
    torch.testing.assert_close(parts[0], found, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts[1], 3 * parts[0], rtol=1e-12, atol=1e-14)


def test_directions_of_the_bottleneck_are_exact_long_before_those_of_phi() -> None:
    case = bottleneck()  # 12 numbers in φ, 6 in ψ
    truth = vector(unrolled(case.problem, case.phi)[0])
    method = hg.ForwardGradient(directions=6, law=hg.Orthonormal())
    narrow = vector(hg.hypergradient(case.problem, case.phi, method).grad)
    wide = vector(hg.hypergradient(case.problem.composed(), case.phi, method).grad)
    torch.testing.assert_close(narrow, truth, rtol=1e-11, atol=1e-12)
    assert (wide - truth).norm() > 0.1 * truth.norm()


def test_shrinkage_is_one_over_one_plus_the_relative_error() -> None:
    case = Quadratic(steps=1, gamma=0.0)
    plain, small = (
        hg.hypergradient(case.problem(), case.x, hg.ForwardGradient(directions=4, shrink=shrink)).grad
        for shrink in (False, True)
    )
    torch.testing.assert_close(small, plain * 4 / (4 + N - 1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("beside", ["guides", "control"])
def test_shrinkage_is_refused_beside_what_has_another_error(beside: str) -> None:
    given = torch.ones(N, dtype=torch.float64)
    with pytest.raises(UserError, match=f"shrink: got True beside {beside}; .*; pass one of them"):
        hg.ForwardGradient(directions=4, shrink=True, **{beside: (given,) if beside == "guides" else given})


def test_shrinkage_goes_by_the_directions_that_are_left() -> None:
    problem, x = steep(1e200, 3)
    problem = dataclasses.replace(problem, outer=lambda z, x: 2 * z.sum())
    with pytest.warns(RuntimeWarning, match="1 of 4"):
        plain, small = (
            hg.hypergradient(problem, x, hg.ForwardGradient(directions=4, law=hg.Coordinate(), shrink=shrink)).grad
            for shrink in (False, True)
        )
    torch.testing.assert_close(small, plain * 3 / 4, rtol=1e-12, atol=0)  # 1 + N/b − 1 with three of four left


def test_the_control_variate_makes_a_fixed_problem_exact() -> None:
    case, control = Quadratic(steps=1), torch.zeros(N, dtype=torch.float64)
    errors = []
    for step in range(30):
        method = hg.ForwardGradient(directions=4, control=control)
        found = hg.hypergradient(case.problem(), case.x, method, seed=step)
        control = found.control
        errors.append((found.grad - case.hypergradient()).norm().item())
    # (1 − 4/7)^15 = 3e-6 on average
    assert errors[-1] < 1e-3 * errors[0]
    torch.testing.assert_close(control, case.hypergradient() - case.direct, rtol=0, atol=1e-2)


def test_the_control_variate_lives_in_the_space_of_the_bottleneck() -> None:
    case = bottleneck()
    method = hg.ForwardGradient(directions=6, law=hg.Orthonormal(), control=torch.ones(6, dtype=torch.float64))
    found = hg.hypergradient(case.problem, case.phi, method)
    assert found.control.shape == (6,)
    torch.testing.assert_close(vector(found.grad), vector(unrolled(case.problem, case.phi)[0]), rtol=1e-10, atol=1e-11)


def steep(rate: float, steps: int) -> tuple[hg.Bilevel, Tensor]:
    """z stays at 0 while its tangent along the first coordinate grows by ``rate`` a step."""
    problem = hg.Bilevel(
        inner=lambda z, x, batch: -0.5 * (rate - 1) * z[0].square() + 0.5 * z[1:].square().sum() - z @ x,
        outer=lambda z, x: z.sum(),
        init=torch.zeros(4, dtype=torch.float64),
        optimizer=hg.SGD(lr=1.0),
        steps=steps,
    )
    return problem, torch.zeros(4, dtype=torch.float64)


def test_a_direction_that_overflows_is_omitted_and_counted_with_a_warning() -> None:
    problem, x = steep(1e200, 3)
    method = hg.ForwardGradient(directions=4, law=hg.Coordinate())
    with pytest.warns(RuntimeWarning, match="1 of 4 directions were lost or overflowed"):
        found = hg.hypergradient(problem, x, method)
    assert found.report.masked == 1
    assert int(torch.isfinite(found.report.weights).sum()) == 3
    torch.testing.assert_close(found.grad, torch.tensor([0.0, 4 / 3, 4 / 3, 4 / 3], dtype=torch.float64))
    # z stays x along the three that are left: each of their tangents is v itself
    assert found.report.growth == pytest.approx([1.0, 1.0, 1.0], rel=1e-12)


def test_growth_is_reported_and_a_chaotic_run_warned_of() -> None:
    problem, x = steep(3.0, 20)
    with pytest.warns(RuntimeWarning, match="the run is chaotic"):
        report = hg.hypergradient(problem, x, hg.ForwardGradient(directions=2)).report
    assert len(report.growth) == 20
    # Rademacher: y = Σ 3^k along one coordinate, 1 along three, over ‖v‖ = 2
    truth = [math.hypot((3.0 ** (t + 1) - 1) / 2, math.sqrt(3)) / 2 for t in range(20)]
    assert report.growth == pytest.approx(truth, rel=1e-12)
    assert report.exponent == pytest.approx(math.log(3), rel=1e-4)


def test_a_calm_run_is_not_warned_of() -> None:
    report = hg.hypergradient(Quadratic().problem(), Quadratic().x, hg.ForwardGradient(directions=2)).report
    assert report.exponent is not None
    assert report.exponent < 0.1
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hg.ForwardGradient(directions=0), "directions: got 0"),
        (lambda: hg.ForwardGradient(directions=2.5), "directions: got 2.5; .*pass a whole number >= 1"),
        (lambda: hg.ForwardGradient(width=2.0), "width: got 2.0"),
        (lambda: hg.ForwardGradient(law=hg.Rademacher), r"law: got Rademacher; a law .*such as Rademacher\(\)"),
        (lambda: hg.ForwardGradient(law="Rademacher"), "law: got 'Rademacher'"),
        (lambda: hg.Forward(chunk=1.5), "chunk: got 1.5"),
        (lambda: hg.ForwardGradient(chunk=0), "chunk: got 0"),
        (lambda: hg.ForwardGradient(width=0), "width: got 0"),
        (lambda: hg.ForwardGradient(tail=-1), "tail: got -1"),
        (lambda: hg.Forward(chunk=0), "chunk: got 0"),
        (lambda: hg.ForwardGradient(guides=(hg.HessianFree(),), control=SHORT.x), "control: got guides too"),
    ],
)
def test_counts_that_cannot_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("law", [hg.Orthonormal(), hg.Coordinate()], ids=name)
def test_more_directions_than_numbers_are_refused(law: Any) -> None:
    with pytest.raises(UserError, match=f"directions: got {N + 1}; .* pass directions <= {N}, or Rademacher"):
        hg.hypergradient(SHORT.problem(), SHORT.x, hg.ForwardGradient(directions=N + 1, law=law))
