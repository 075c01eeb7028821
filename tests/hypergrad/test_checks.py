"""Checks of a problem before its run, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles.problems import example_weights
from oracles.quadratic import N, Quadratic
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.inner.checks import check_problem, check_tree


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([], "phi: got .*nothing to differentiate"),
        ([torch.zeros(1, dtype=torch.bool)], "phi: got a leaf torch.bool; only floating tensors have derivatives"),
        ([torch.zeros(1, dtype=torch.complex64)], "phi: got a leaf torch.complex64"),
        ([1.0], "phi: got a leaf of type float"),
        (torch.nn.Linear(1, 1), "phi: got a leaf of type Linear"),
    ],
)
def test_what_has_no_derivative_is_refused(tree: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_tree("phi", tree)


def _without_graph(theta: Any, phi: Any) -> torch.Tensor:
    with torch.no_grad():
        return theta["out"].square().sum()


METHODS = [hg.Reverse(), hg.Checkpointed(), hg.ForwardGradient(directions=2), hg.HessianFree(), hg.FiniteDifference()]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_outer_loss_that_depends_on_nothing_is_refused(method: Any) -> None:
    """Its gradient is zero, and would look like an optimum."""
    case = example_weights()
    for outer in (_without_graph, lambda theta, phi: torch.tensor(1.0, dtype=torch.float64)):
        with pytest.raises(UserError, match="outer: got a loss that depends on neither theta nor phi"):
            hg.hypergradient(dataclasses.replace(case.problem, outer=outer), case.phi, method)


def test_beside_losses_along_the_run_the_one_at_the_end_may_be_constant() -> None:
    case = example_weights()
    along = {
        "outer": lambda theta, phi: torch.zeros((), dtype=torch.float64),
        "path": lambda t, theta, phi: theta["out"].sum(),
    }
    problem = dataclasses.replace(case.problem, **along)
    assert vector(hg.hypergradient(problem, case.phi, hg.Reverse()).grad).abs().sum() > 0


def test_the_check_costs_one_forward_pass_and_takes_no_step() -> None:
    case, calls = example_weights(), []

    def inner(theta: Any, phi: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return case.problem.inner(theta, phi, batch)

    unroll = check_problem(dataclasses.replace(case.problem, inner=inner), case.phi, seed=4)
    assert len(calls) == 1
    assert (unroll.seed, unroll.steps) == (4, 4)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_rates_by_leaf_in_another_order_are_refused_at_whatever_step(at: int) -> None:
    case = example_weights(hg.SGD(lr=lambda step: {"out": 0.3, "hidden": 0.1} if step == at else 0.1))
    with pytest.raises(UserError, match=f"optimizer.lr: got values in another nesting or order than θ at step {at}"):
        hg.hypergradient(*case, hg.Reverse())


def test_rates_by_leaf_of_a_bottleneck_are_refused_in_another_order_inside_least_squares_too() -> None:
    theta = {"w": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(2, dtype=torch.float64)}

    def fitted(names: str) -> Any:
        inner = hg.Bilevel(
            inner=lambda theta, psi, batch: (theta["w"] - 1).square().sum() / 2 + (theta["v"] - 2).square().sum(),
            outer=lambda theta, phi: theta["w"].sum(), init=theta, through=lambda phi: phi.square(), steps=4,
            optimizer=hg.SGD(lr=lambda step, psi: {name: psi["wv".index(name)] for name in names}),
        )  # fmt: skip
        # θ_w = 1 − (1 − η)⁴ with η = φ_w²
        problem = hg.Residuals(solve=inner, residuals=lambda u, phi: torch.cat([u["w"] - 0.3, u["v"] - 0.8]))
        return hg.least_squares(problem, torch.tensor([0.3, 0.2], dtype=torch.float64)).phi

    truth = [(1 - 0.7**0.25) ** 0.5, ((1 - 0.6**0.25) / 2) ** 0.5]
    assert fitted("wv").tolist() == pytest.approx(truth, rel=1e-6)
    with pytest.raises(UserError, match=r"optimizer.lr: got values in another nesting or order than θ"):
        fitted("vw")


class Rule:
    """θ' = θ − 0.1 g, in one of many ways."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.way = way

    def start(self, theta: Any, phi: Any) -> Any:
        return ()

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return [self.way(weight, grad) for weight, grad in zip(theta, grads, strict=True)], slots


def _frozen(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight - 0.1 * grad


BY_VALUE = {
    "no_grad": _frozen,
    "detached": lambda w, g: w.detach() - 0.1 * g.detach(),
    "of the gradient": lambda w, g: w - 0.1 * g.detach(),
    "of the weights": lambda w, g: w.detach() - 0.1 * g,
    "numpy": lambda w, g: w - 0.1 * torch.from_numpy(g.numpy()),
}
UNROLLED = [hg.Reverse(), hg.Checkpointed(), hg.Truncated(steps=1), hg.Forward(), hg.ForwardGradient(directions=4)]


class ByMomentum(Rule):
    """The state has the slope of the gradients, the step takes the state as a constant."""

    def start(self, theta: Any, phi: Any) -> Any:
        return [torch.zeros_like(weight) for weight in theta]

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        slots = [0.9 * slot + grad for slot, grad in zip(slots, grads, strict=True)]
        return [weight - 0.1 * slot.detach() for weight, slot in zip(theta, slots, strict=True)], slots


def test_a_slope_that_ends_in_the_state_is_none() -> None:
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64)
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum(), outer=lambda theta, phi: theta.sum(),
        init=theta, steps=3, optimizer=ByMomentum(lambda w, g: w),
    )  # fmt: skip
    for method in UNROLLED:
        with pytest.raises(UserError, match=r"optimizer.update: got a step that takes the gradients as constants"):
            hg.hypergradient(problem, torch.zeros(2, dtype=torch.float64), method)


@pytest.mark.parametrize("way", BY_VALUE)
def test_an_update_without_a_slope_is_refused_by_all_that_unroll_and_by_no_other(way: str) -> None:
    """Forward mode would give zero, and reverse mode zero or an error of torch's."""
    case = Quadratic(steps=3, eta=0.1)
    problem = case.problem(optimizer=Rule(BY_VALUE[way]))
    for method in UNROLLED:
        with pytest.raises(UserError, match=r"optimizer\.update: got .*no_grad\(\).*or use ZerothOrder") as caught:
            hg.hypergradient(problem, case.x, method)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"optimizer\.update"):
        hg.Stream(problem, case.x, hg.ForwardGradient(directions=4))
    # a run is linear in x and the outer loss is differentiated exactly, so differences have rounding alone
    frame = hg.ZerothOrder(directions=N, law=hg.Orthonormal(), step=1e-2)
    found = hg.hypergradient(problem, case.x, frame).grad
    torch.testing.assert_close(found, case.hypergradient(), rtol=1e-9, atol=1e-10)
    implicit = hg.hypergradient(problem, case.x, hg.HessianFree()).grad
    eye = torch.eye(len(case.d), dtype=torch.float64)
    torch.testing.assert_close(implicit, case.implicit(eye), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(hg.solve(problem, case.x), case.end(), rtol=1e-12, atol=1e-13)


class Averaging:
    """Dual averaging: θ' = −0.1 Σ g, which never reads the weights."""

    def start(self, theta: Any, phi: Any) -> Any:
        return [torch.zeros_like(weight) for weight in theta]

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        sums = [total + grad for total, grad in zip(slots, grads, strict=True)]
        return [-0.1 * total for total in sums], sums


class Delayed(Averaging):
    """θ' = θ − 0.1 m with the moment of the step before, which is zero at first."""

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        moved = [weight - 0.1 * moment for weight, moment in zip(theta, slots, strict=True)]
        return moved, [0.5 * moment + grad for moment, grad in zip(slots, grads, strict=True)]


LEGAL = {
    "averaging": Averaging(), "delayed": Delayed(), "no rate": Rule(lambda w, g: w - 0.0 * g),
    "signs": Rule(lambda w, g: w - 0.1 * g.sign()), "normalized": Rule(lambda w, g: w - 0.1 * g / g.norm().detach()),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_an_update_with_a_slope_is_not_refused_whatever_it_reads(name: str) -> None:
    case = Quadratic(steps=3)
    problem = case.problem(optimizer=LEGAL[name])
    (exact,), _, _ = unrolled(problem, case.x)
    for method in (hg.Reverse(), hg.Forward()):
        found = hg.hypergradient(problem, case.x, method).grad
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)
