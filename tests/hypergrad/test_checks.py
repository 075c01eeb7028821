"""Checks of a problem before its run, and what they cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oracles.problems import example_weights
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


def test_the_check_costs_one_forward_pass_and_takes_no_step() -> None:
    case, calls = example_weights(), []

    def inner(theta: Any, phi: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return case.problem.inner(theta, phi, batch)

    unroll = check_problem(dataclasses.replace(case.problem, inner=inner), case.phi, seed=4)
    assert len(calls) == 1
    assert (unroll.seed, unroll.steps) == (4, 4)
