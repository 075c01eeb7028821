"""The problem: what it accepts, which arguments it hands out, when two batches are the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from oracles.problems import MOMENTUM, bilevel, bottleneck, draw
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.problem import check_scalar, same_data


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps: got 0; an inner run takes at least one; pass steps >= 1"),
        ({"steps": 2.5}, "steps: got 2.5"),
        ({"inner": None}, "inner: got None; it is called; pass a function"),
        ({"outer": 3}, "outer: got 3"),
        ({"batches": [1, 2, 3]}, "batches: got 3 for 4 steps; each step takes its own"),
        ({"batches": (step for step in range(4))}, "batches: got .*generator"),
    ],
)
def test_a_problem_that_cannot_be_run_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        bilevel(MOMENTUM, **changes)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    problem = bilevel(MOMENTUM, batches=lambda step, generator: (step, torch.rand(2, generator=generator)))
    assert same_data(problem.batch(3, seed=1), problem.batch(3, seed=1))
    assert not same_data(problem.batch(3, seed=1), problem.batch(3, seed=2))
    assert not torch.equal(problem.batch(3, seed=1)[1], problem.batch(2, seed=1)[1])
    assert bilevel(MOMENTUM).batch(0, seed=0) is None
    assert bilevel(MOMENTUM, batches="abcd").batch(2, seed=0) == "c"


def test_batches_are_compared_to_the_last_bit() -> None:
    x = {"x": torch.tensor([1.0, 2.0]), "name": "a"}
    assert same_data(x, {"x": x["x"].clone(), "name": "a"})
    assert not same_data(x, {"x": x["x"] + 1e-7, "name": "a"})
    assert not same_data(x, {"x": x["x"].double(), "name": "a"})
    assert not same_data(x, {"x": x["x"][None], "name": "a"})
    assert not same_data(x, [x["x"], "a"])
    assert not same_data(x, {"x": x["x"], "name": "b"})
    assert same_data(np.arange(3), np.arange(3))
    missing = torch.tensor([1.0, math.nan])
    assert same_data(missing, missing.clone())  # a hole in the data is the same hole


def test_without_the_bottleneck_the_same_numbers_come_out() -> None:
    case = bottleneck()
    wide = case.problem.composed()
    assert wide.through is None
    theta = case.problem.init
    inside = case.problem.inner(theta, case.problem.through(case.phi), None)
    assert torch.equal(wide.inner(theta, case.phi, None), inside)
    assert wide.composed() is wide


@pytest.mark.parametrize(
    "init",
    [lambda psi: 3 * psi, lambda psi, generator: psi + torch.rand(2, generator=generator).double()],
    ids=["plain", "random"],
)
def test_an_initialisation_is_composed_too(init: Any) -> None:
    problem = hg.Bilevel(
        inner=lambda theta, psi, batch: (theta * psi).sum(),
        outer=lambda theta, phi: theta.sum(),
        init=init,
        optimizer=hg.SGD(lr=0.1),
        steps=1,
        through=lambda phi: phi.square(),
    )
    phi = draw(2, seed=1)
    torch.testing.assert_close(problem.composed().start(phi, 5), problem.start(phi.square(), 5), rtol=0, atol=0)


class Learnt(hg.SGD):
    """A subclass that reads what it is given."""

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return [w - phi * g for w, g in zip(theta, grads, strict=True)], slots


def test_a_subclass_of_ours_reads_psi_in_the_composed_problem_too() -> None:
    problem = hg.Bilevel(
        inner=lambda theta, psi, batch: (theta - 1).square().sum() / 2, outer=lambda theta, phi: theta.square().sum(),
        init=torch.zeros(3, dtype=torch.float64), optimizer=Learnt(), steps=4, through=lambda phi: phi.exp(),
    )  # fmt: skip
    phi = torch.tensor(-2.3, dtype=torch.float64)
    ends = [hg.solve(one, phi) for one in (problem, problem.composed())]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-14, atol=0)
    narrow, wide = (hg.hypergradient(one, phi, hg.Reverse()).grad for one in (problem, problem.composed()))
    torch.testing.assert_close(narrow, wide, rtol=1e-12, atol=0)


def test_a_rate_that_reads_psi_reads_it_in_the_composed_problem_too() -> None:
    problem = hg.Bilevel(
        inner=lambda theta, psi, batch: (theta * psi["w"]).sum(),
        outer=lambda theta, phi: theta.sum(),
        init=torch.zeros(2, dtype=torch.float64),
        optimizer=hg.SGD(lr=lambda step, psi: psi["rate"]),
        steps=2,
        through=lambda phi: {"w": phi[:2], "rate": phi[2].exp()},
    )
    phi = draw(3, seed=1)
    narrow, wide = (hg.hypergradient(one, phi, hg.Reverse()).grad for one in (problem, problem.composed()))
    torch.testing.assert_close(narrow, wide, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [torch.zeros(1), torch.tensor(1), 0.5, None])
def test_a_loss_is_one_floating_number(value: Any) -> None:
    with pytest.raises(UserError, match="inner: got"):
        check_scalar("inner", value)
    assert check_scalar("inner", torch.tensor(1.0)) == 1.0
