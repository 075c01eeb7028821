"""Checks of a problem before its run, and what they cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oracles.problems import example_weights
from sparing.errors import UserError
from sparing.hypergrad.checks import check_problem, check_tree


def test_a_tree_comes_back_without_history() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not check_tree("phi", [leaf * 2])[0].requires_grad


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


def test_the_check_costs_one_forward_pass_and_takes_no_step() -> None:
    case, calls = example_weights(), []

    def inner(theta: Any, phi: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return case.problem.inner(theta, phi, batch)

    unroll = check_problem(dataclasses.replace(case.problem, inner=inner), case.phi, seed=4)
    assert len(calls) == 1
    assert (unroll.seed, unroll.steps) == (4, 4)


def test_data_that_changes_are_caught_and_data_by_generator_are_not() -> None:
    case = example_weights()
    moving = iter(range(100))
    with pytest.raises(UserError, match="batches: got other data on a second call"):
        check_problem(dataclasses.replace(case.problem, batches=lambda step: next(moving)), case.phi, seed=0)
    seeded = lambda step, generator: torch.rand(3, generator=generator)  # noqa: E731
    check_problem(dataclasses.replace(case.problem, batches=seeded), case.phi, seed=0)
    with pytest.raises(UserError, match="draw from the generator it is given"):
        check_problem(dataclasses.replace(case.problem, batches=lambda step: torch.rand(3)), case.phi, seed=0)
