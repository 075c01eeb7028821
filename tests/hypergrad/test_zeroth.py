"""Zeroth order: error of the second order in the step, black boxes, common randomness, and a peer's mistake."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.problems import bottleneck, dropout, example_weights, fresh_start
from oracles.quadratic import Quadratic, random
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.forward_mode.sampled import draw_directions
from sparing.hypergrad.inner.checks import PIECE
from sparing.seeds import number


def basis(count: int, **settings: Any) -> hg.ZerothOrder:
    return hg.ZerothOrder(directions=count, law=hg.Orthonormal(), **settings)


def error(case: Any, method: hg.ZerothOrder) -> float:
    truth = vector(unrolled(case.problem, case.phi)[0])
    return (vector(hg.hypergradient(case.problem, case.phi, method).grad) - truth).norm().item()


@pytest.mark.parametrize("exact_outer", [True, False])
@pytest.mark.parametrize("make", [example_weights, bottleneck, dropout])
def test_the_error_falls_with_the_square_of_the_step(make: Any, exact_outer: bool) -> None:
    """Slope 2 ± 0.05; a forward difference has slope 1, other masks in the two runs none at all."""
    large, small = (error(make(), basis(6, step=step, exact_outer=exact_outer)) for step in (4e-2, 1e-2))
    assert math.log(large / small) / math.log(4) == pytest.approx(2, abs=0.05)


def test_a_forward_difference_is_of_the_first_order_only() -> None:
    """Equation 16 as the paper writes it, beside ours."""
    case = example_weights()
    plain = dataclasses.replace(
        case.problem, outer=lambda theta, phi: case.problem.outer(theta, {"weight": torch.zeros(6)})
    )
    truth = vector(unrolled(plain, case.phi)[0])

    def h(weight: Tensor) -> Tensor:
        return plain.outer(hg.solve(plain, {"weight": weight}), {"weight": weight})

    at, eye, errors = case.phi["weight"], torch.eye(6, dtype=torch.float64), []
    for step in (1e-2, 1e-3):
        found = torch.stack([(h(at + step * row) - h(at)) / step for row in eye])
        errors.append((found - truth).norm().item())
    assert math.log10(errors[0] / errors[1]) == pytest.approx(1, abs=0.1)
    ours = hg.hypergradient(plain, case.phi, basis(6, step=1e-3)).grad["weight"]
    assert (ours - truth).norm() < 0.02 * errors[1]


@pytest.mark.parametrize("law", [hg.Rademacher(), hg.Coordinate()], ids=["Rademacher", "Coordinate"])
def test_weights_are_those_of_forward_mode(law: Any) -> None:
    """A quadratic run is linear in φ: the difference is exact up to rounding over µ."""
    case = Quadratic()
    pair = [
        hg.hypergradient(case.problem(), case.x, method, seed=3)
        for method in (hg.ZerothOrder(directions=4, law=law, step=1e-2), hg.ForwardGradient(directions=4, law=law))
    ]
    torch.testing.assert_close(pair[0].report.weights, pair[1].report.weights, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(pair[0].grad, pair[1].grad, rtol=1e-10, atol=1e-11)
    assert pair[0].report.norm_squared == pytest.approx(pair[1].report.norm_squared, rel=1e-9)
    assert pair[0].report.cosine == pytest.approx(pair[1].report.cosine, rel=1e-9)


def test_random_initial_weights_are_shared_by_both_ends_of_a_difference() -> None:
    assert error(fresh_start(), basis(7, step=1e-4)) < 1e-6  # ψ: one scale and six weights


FIELD = random(5, 3, seed=8)


def boxed() -> hg.BlackBox:
    """NumPy inside: nothing here can be differentiated."""

    def solve(phi: Any) -> Any:
        nu = phi["nu"].numpy()
        return {"u": torch.from_numpy((FIELD.numpy() @ nu) ** 3), "scale": torch.from_numpy(nu[:1] ** 2)}

    def outer(u: Any, phi: Any) -> Tensor:
        return u["u"].square().sum() * u["scale"][0] + phi["nu"].sum() ** 2

    return hg.BlackBox(solve=solve, outer=outer)


def test_a_black_box_is_differenced_and_its_outer_loss_differentiated() -> None:
    nu = torch.tensor([0.5, -0.4, 0.8], dtype=torch.float64)

    def h(at: Tensor) -> Tensor:
        return ((FIELD @ at) ** 3).square().sum() * at[0] ** 2 + at.sum() ** 2

    truth = torch.func.grad(h)(nu)
    found = hg.hypergradient(boxed(), {"nu": nu}, basis(3, step=1e-4))
    torch.testing.assert_close(found.grad["nu"], truth, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.value, h(nu))
    assert set(found.theta) == {"u", "scale"}
    assert found.report.steps == 0


def test_the_released_estimator_of_a_peer_is_wrong_and_ours_is_not() -> None:
    """TorchOpt 0.7.3 zero_order("forward"): times σ in place of over σ, and its base is overwritten in the loop."""
    slope, generator = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.Generator().manual_seed(0)

    def f(x: Tensor) -> Tensor:
        return (slope * x).sum() + 5

    def released(sigma: float, samples: int = 2000) -> Tensor:
        x, total = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        output = f(x)
        for _ in range(samples):
            noise = torch.randn(3, generator=generator, dtype=torch.float64)
            output = f(x + sigma * noise) - output
            total += output * noise * sigma
        return total / samples

    assert (released(0.1) - slope).norm() > 0.9 * slope.norm()
    assert (released(1.0) - slope).norm() > 0.2 * slope.norm()
    box = hg.BlackBox(solve=lambda x: x.clone(), outer=lambda u, x: f(u))
    for step in (0.1, 1.0):
        found = hg.hypergradient(box, torch.zeros(3, dtype=torch.float64), basis(3, step=step)).grad
        torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-12)


def test_a_black_box_takes_nothing_but_zeroth_order() -> None:
    with pytest.raises(UserError, match=r"method: got reverse; a black box has no derivative; pass ZerothOrder"):
        hg.hypergradient(boxed(), {"nu": torch.ones(3).double()}, hg.Reverse())


@pytest.mark.parametrize(
    ("solve", "words"),
    [
        (lambda x: x.numpy(), "got a leaf of type ndarray; .*torch.from_numpy"),
        (lambda x: {"u": x, "steps": 7}, "got a leaf of type int"),
        (lambda x: None, "got a leaf of type NoneType"),
        (lambda x: x.long(), r"got a leaf torch\.int64"),
        (lambda x: {}, "there is nothing to differentiate"),
        (lambda x: x / 0, "got values that are not finite; .*; pass a φ inside the domain of the solver"),
        (lambda x: x.repeat(1 + int(x[0] > 1)), "got other shapes than at φ itself"),
    ],
)
def test_a_solver_that_returns_no_finite_tree_of_tensors_is_refused(solve: Any, words: str) -> None:
    box = hg.BlackBox(solve=solve, outer=lambda u, x: x.sum())
    with pytest.raises(UserError, match=rf"^solve\(phi\): .*{words}"):
        hg.hypergradient(box, torch.ones(3, dtype=torch.float64), basis(3))


def test_a_solver_may_write_every_solution_into_the_same_memory() -> None:
    case = Quadratic()
    buffer = torch.zeros(3, dtype=torch.float64)

    def fresh(phi: Tensor) -> Tensor:
        return torch.stack((phi.square().sum(), phi[0] * phi[1], phi.sum()))

    def reusing(phi: Tensor) -> Tensor:
        return buffer.copy_(fresh(phi))

    phi = case.x.detach()[:4].clone()
    found = [
        hg.hypergradient(hg.BlackBox(solve=solve, outer=lambda u, phi: u.square().sum()), phi, basis(len(phi)))
        for solve in (fresh, reusing)
    ]
    assert torch.equal(found[0].grad, found[1].grad)
    assert found[0].grad.abs().sum() > 0
    assert torch.equal(found[1].theta, fresh(phi))  # that of φ, not of the last point that was asked for


def test_a_black_box_whose_outer_loss_has_no_graph_is_refused() -> None:
    box = hg.BlackBox(solve=lambda phi: phi.square(), outer=lambda u, phi: u.detach().sum())
    with pytest.raises(UserError, match="outer: got a loss that depends on neither"):
        hg.hypergradient(box, torch.ones(3, dtype=torch.float64), basis(3))


def test_an_outer_loss_that_is_not_finite_is_told_apart_from_the_solver() -> None:
    box = hg.BlackBox(solve=lambda x: x.clone(), outer=lambda u, x: u.sum() / 0)
    with pytest.raises(RunError, match=r"the outer loss is not finite though solve\(phi\) is"):
        hg.hypergradient(box, torch.ones(3, dtype=torch.float64), basis(3))


def test_a_solver_that_fails_along_one_direction_loses_that_direction_only() -> None:
    """A solver may return NaN outside of its domain; the mean is over the rest, and the result warns."""
    box = hg.BlackBox(solve=lambda x: (x + 1e-4).sqrt() + x, outer=lambda u, x: u.sum())
    x = torch.tensor([0.0, 4.0, 4.0], dtype=torch.float64)
    method = hg.ZerothOrder(directions=3, law=hg.Coordinate(), step=1e-2)
    with pytest.warns(RuntimeWarning, match="1 of 3 directions"):
        found = hg.hypergradient(box, x, method)
    assert found.report.masked == 1
    torch.testing.assert_close(found.grad[1:], torch.full((2,), 1.25 * 3 / 2).double(), rtol=1e-5, atol=0)


def test_the_directions_are_the_documented_ones() -> None:
    case = Quadratic()
    found = hg.hypergradient(case.problem(), case.x, hg.ZerothOrder(directions=3), seed=9)
    rows = draw_directions(hg.Rademacher(), 3, case.x, number(9, "directions")).rows(range(3))
    expected = found.report.weights @ rows / 3 + case.direct
    torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"directions": 0}, "directions: got 0"),
        ({"directions": 2.5}, "directions: got 2.5; .*pass a whole number >= 1"),
        ({"step": 0.0}, "step: got 0.0"),
        ({"step": -1.0}, "step: got -1.0"),
        ({"step": math.inf}, "step: got inf"),
        ({"law": hg.Gaussian}, r"law: got Gaussian; a law of directions is a value; pass one, such as Rademacher\(\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        hg.ZerothOrder(**settings)


LAWS = [hg.Coordinate(), hg.Rademacher(), hg.Gaussian(), hg.Sphere(), hg.Orthonormal()]


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 5])
def test_a_lost_element_is_found_wherever_it_is(place: int) -> None:
    """φ is compared piece by piece, here in two leaves, each a little longer than a piece."""
    sizes = [PIECE + 3, PIECE + 4]
    phi = [torch.zeros(size) for size in sizes]
    phi[place // sizes[0]][place % sizes[0]] = 1e5
    box = hg.BlackBox(solve=lambda at: torch.cat(at).sum(), outer=lambda u, _: u.double())
    with pytest.raises(UserError, match=r"cannot hold it beside 1e\+05"):
        hg.hypergradient(box, phi, hg.ZerothOrder(directions=2))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_step_that_one_element_cannot_hold_is_refused_and_small_parts_of_a_direction_are_not(law: Any) -> None:
    """Beside 1e5 float32 has steps of 8e-3. Beside 3 it has 2e-7: the smallest of 200 Gaussian numbers is lost there,
    and counts for nothing."""
    method = hg.ZerothOrder(directions=200, law=law)
    box = hg.BlackBox(solve=torch.sin, outer=lambda u, phi: u.double().sum())
    phi = torch.linspace(-3, 3, 200)
    found = hg.hypergradient(box, phi, method).grad
    if isinstance(law, hg.Coordinate | hg.Orthonormal):
        # rounding of 2e-7 over a step of 1e-3
        torch.testing.assert_close(found, phi.double().cos().float(), rtol=0, atol=2e-3)
    phi[-1] = 1e5
    with pytest.raises(
        UserError, match=r"ZerothOrder.step: got 0.001; φ of torch.float32 cannot hold it beside 1e\+05"
    ):
        hg.hypergradient(box, phi, method)


@pytest.mark.parametrize("graph", [True, False], ids=["with a graph", "of NumPy"])
def test_values_of_the_outer_loss_of_a_black_box_are_differenced_whole(graph: bool) -> None:
    """h = Σ(2φ)² s + 3 Σ φ² is quadratic, so central differences have rounding alone; dh/dφ = (8s + 6)φ."""

    def outer(u: Any, phi: Any) -> Tensor:
        value = u.square().sum() * 5 + 3 * phi.square().sum()
        return value if graph else torch.tensor(float(value.detach().numpy()), dtype=torch.float64)

    box = hg.BlackBox(solve=lambda phi: 2 * phi, outer=outer)
    phi = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    found = hg.hypergradient(box, phi, basis(3, step=1e-2, exact_outer=False))
    torch.testing.assert_close(found.grad, 46 * phi, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found.value, 23 * phi.square().sum(), rtol=1e-14, atol=0)


def test_the_outer_loss_of_a_black_box_is_smoothed_by_its_differences() -> None:
    """|u| across its kink: (|φ + µ| − |φ − µ|)/2µ = φ/µ, where the derivative is the sign."""
    box = hg.BlackBox(solve=lambda phi: phi.clone(), outer=lambda u, phi: u.abs().sum())
    phi = torch.tensor([0.02], dtype=torch.float64)
    exact, differenced = (
        hg.hypergradient(box, phi, basis(1, step=0.025, exact_outer=way)).grad.item() for way in (True, False)
    )
    assert (exact, differenced) == (pytest.approx(1.0), pytest.approx(0.8))


@pytest.mark.parametrize("exact_outer", [True, False])
def test_an_outer_loss_of_a_black_box_draws_the_same_numbers_and_writes_nothing(exact_outer: bool) -> None:
    phi, method = torch.ones(2, dtype=torch.float64), basis(2, step=1e-2, exact_outer=exact_outer)
    random_outer = lambda u, phi: torch.nn.functional.dropout(u, 0.5).square().sum()  # noqa: E731
    before = torch.get_rng_state()
    one, two = (
        hg.hypergradient(hg.BlackBox(solve=lambda phi: phi * 2, outer=random_outer), phi, method, seed=3)
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.grad, two.grad)
    # u = 2φ is kept at twice its size or dropped: dh/dφ = 32 φ or 0
    assert all(min(abs(slope - 32), abs(slope)) < 1e-9 for slope in one.grad.tolist())
    norm, rows = torch.nn.BatchNorm1d(2).double(), random(4, 2, seed=1)
    writing = hg.BlackBox(solve=lambda phi: phi * 2, outer=lambda u, phi: norm(rows * u).pow(3).sum())
    with pytest.raises(UserError, match="outer: got aten::add_"):
        hg.hypergradient(writing, phi, method)
    assert norm.num_batches_tracked == 0
    calls = itertools.count(1)
    counting = hg.BlackBox(solve=lambda phi: phi * 2, outer=lambda u, phi: u.sum() * next(calls))
    if not exact_outer:
        with pytest.raises(UserError, match="outer: got another value at the same θ and φ"):
            hg.hypergradient(counting, phi, method)
