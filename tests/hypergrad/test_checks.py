"""Checks of a problem before its run, and what they cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oracles.problems import example_weights
from oracles.unrolled import vector
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
