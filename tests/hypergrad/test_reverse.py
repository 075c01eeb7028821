"""Reverse unrolling: closed forms of a quadratic run, the error of truncation, and two mistakes of released code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.problems import OPTIMIZERS, example_weights
from oracles.quadratic import M, Quadratic
from oracles.unrolled import vector
from sparing import hypergrad as hg
from sparing.errors import UserError

TIGHT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_whole_run_has_its_matrix_form(momentum: float, decay: float) -> None:
    case = Quadratic(momentum=momentum, decay=decay)
    found = hg.hypergradient(case.problem(), case.x, hg.Reverse())
    torch.testing.assert_close(found.theta, case.end(), **TIGHT)
    torch.testing.assert_close(found.grad, case.hypergradient(), **TIGHT)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kept", [1, 3, 11, 12, 20])
def test_truncation_holds_what_went_before_constant(momentum: float, kept: int) -> None:
    """Momentum at the cut included: nothing flows into it."""
    case = Quadratic(momentum=momentum)
    found = hg.hypergradient(case.problem(), case.x, hg.Truncated(steps=kept)).grad
    torch.testing.assert_close(found, case.hypergradient(min(kept, case.steps)), **TIGHT)


@pytest.mark.parametrize("kept", [1, 2, 4, 8])
def test_the_error_of_truncation_is_its_formula(kept: int) -> None:
    """d(I − ηA)^s Z_{T−s}, which the bound (1 − ηα)^s/(ηα)·‖d‖·‖ηC‖ covers."""
    case = Quadratic(low=0.3)
    error = hg.hypergradient(case.problem(), case.x, hg.Reverse()).grad
    error = error - hg.hypergradient(case.problem(), case.x, hg.Truncated(steps=kept)).grad
    step = torch.eye(M, dtype=torch.float64) - case.eta * case.a
    exact = case.d @ torch.linalg.matrix_power(step, kept) @ case.jacobian(case.steps - kept)
    torch.testing.assert_close(error, exact, rtol=1e-9, atol=1e-11)
    rate = 1 - case.eta * case.low
    bound = rate**kept / (case.eta * case.low) * case.d.norm() * torch.linalg.matrix_norm(case.eta * case.c, 2)
    assert error.norm() <= bound


def test_a_moment_left_out_of_the_unroll_is_wrong() -> None:
    """The released reverse baseline holds the momentum constant in each step's pullback."""
    case = Quadratic(momentum=0.9, steps=30, eta=0.1)
    step = torch.eye(M, dtype=torch.float64) - case.eta * case.a
    total = sum(torch.linalg.matrix_power(step, k) for k in range(case.steps))
    released = case.d @ total @ (-case.eta * case.c) + case.direct
    found, truth = hg.hypergradient(case.problem(), case.x, hg.Reverse()).grad, case.hypergradient()
    torch.testing.assert_close(found, truth, **TIGHT)
    assert (released - truth).norm() > 0.3 * truth.norm()


def test_a_loop_that_starts_at_the_second_step_is_wrong() -> None:
    """The released loop walks back from T to 2, so θ₀ → θ₁ adds nothing: all there is to see at T = 1."""
    case = Quadratic(steps=1)
    released = case.direct  # an empty loop
    found = hg.hypergradient(case.problem(), case.x, hg.Reverse()).grad
    torch.testing.assert_close(found, case.hypergradient(), **TIGHT)
    assert (released - found).norm() > 0.1 * found.norm()


def test_the_batch_of_a_step_is_the_batch_its_pullback_sees() -> None:
    """The released loop stores with θ_t the minibatch of step t, not of t + 1: its slopes are of other data."""
    scales = [0.2, 1.0, 3.0]
    target = torch.tensor([1.0, -2.0], dtype=torch.float64)
    problem = hg.Bilevel(
        inner=lambda theta, phi, scale: 0.5 * scale * (theta - phi).square().sum(),
        outer=lambda theta, phi: (theta * target).sum(),
        init=torch.zeros(2, dtype=torch.float64),
        optimizer=hg.SGD(lr=0.1),
        steps=3,
        batches=scales,
    )

    def pulled(order: list[float]) -> Tensor:
        d, c = target.clone(), torch.zeros(2, dtype=torch.float64)
        for scale in reversed(order):
            c, d = c + 0.1 * scale * d, (1 - 0.1 * scale) * d
        return c

    found = hg.hypergradient(problem, torch.zeros(2, dtype=torch.float64), hg.Reverse()).grad
    torch.testing.assert_close(found, pulled(scales), **TIGHT)
    late = [scales[0], *scales[:-1]]
    assert (pulled(late) - found).norm() > 0.1 * found.norm()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_truncation_at_t_is_reverse_and_short_of_it_is_not(optimizer: str) -> None:
    case = example_weights(OPTIMIZERS[optimizer])
    whole, same, less = (
        vector(hg.hypergradient(case.problem, case.phi, method).grad)
        for method in (hg.Reverse(), hg.Truncated(steps=4), hg.Truncated(steps=3))
    )
    assert torch.equal(whole, same)
    assert (whole - less).norm() > 1e-4 * whole.norm()


@pytest.mark.parametrize("steps", [0, 1.5])
def test_no_step_and_half_a_step_are_refused(steps: Any) -> None:
    with pytest.raises(UserError, match=rf"Truncated.steps: got {steps}; it reaches back s steps; pass steps >= 1"):
        hg.Truncated(steps=steps)
