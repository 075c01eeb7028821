"""The contract of exact hypergradients: each equals a plain loop under autograd. One line admits a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles.problems import (
    OPTIMIZERS,
    PROBLEMS,
    VALID_X,
    VALID_Y,
    Case,
    X,
    Y,
    bottleneck,
    example_weights,
    predict,
    weighted,
)  # fmt: skip
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg

# Relative to the norm of the gradient: rounding of float64 over four steps is below 1e-14.
EXACT = 1e-12

Maker = Callable[[int], Any]
"""Size of ψ -> method."""

METHODS: dict[str, Maker] = {
    "reverse": lambda n: hg.Reverse(),
    "checkpointed sqrt": lambda n: hg.Checkpointed(),
    "checkpointed 0": lambda n: hg.Checkpointed(states=0),
    "checkpointed 1": lambda n: hg.Checkpointed(states=1),
    "checkpointed 9": lambda n: hg.Checkpointed(states=9),
    "checkpointed in bytes": lambda n: hg.Checkpointed(memory="1MB"),
    "truncated beyond T": lambda n: hg.Truncated(steps=99),
    "forward": lambda n: hg.Forward(),
    "forward chunked": lambda n: hg.Forward(chunk=2),
    "orthonormal": lambda n: hg.ForwardGradient(directions=n, law=hg.Orthonormal()),
    "coordinate": lambda n: hg.ForwardGradient(directions=n, law=hg.Coordinate(), chunk=3, width=2),
    "hadamard": lambda n: hg.ForwardGradient(directions=1 << (n - 1).bit_length(), law=hg.Hadamard()),
    "tail": lambda n: hg.ForwardGradient(directions=n, law=hg.Orthonormal(), tail=2),
    "tail of all": lambda n: hg.ForwardGradient(directions=n, law=hg.Orthonormal(), tail=99),
    "guided": lambda n: hg.ForwardGradient(directions=n, guides=(hg.HessianFree(), hg.Truncated(steps=1))),
    "shrunk": lambda n: hg.ForwardGradient(directions=n, law=hg.Coordinate(), shrink=True),
}

EACH_WAY = ["reverse", "checkpointed sqrt", "checkpointed 1", "forward", "orthonormal", "tail"]
"""One of each algorithm, for what only an algorithm can get wrong."""


def size_of_psi(case: Case) -> int:
    return vector(case.problem.through(case.phi) if case.problem.through else case.phi).numel()


def check(case: Case, method: Any, seed: int = 3) -> None:
    truth, value, theta = unrolled(case.problem, case.phi, seed)
    result = hg.hypergradient(case.problem, case.phi, method, seed=seed)
    scale = max(vector(truth).norm().item(), 1e-3)
    assert (vector(result.grad) - vector(truth)).norm().item() <= EXACT * scale
    assert abs(float(result.value - value)) <= EXACT * max(1.0, abs(float(value)))
    torch.testing.assert_close(vector(result.theta), vector(theta), rtol=EXACT, atol=EXACT)
    assert torch.utils._pytree.tree_structure(result.grad) == torch.utils._pytree.tree_structure(case.phi)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_exact_methods_equal_a_plain_loop_on_every_problem(make: Callable[[], Case], method: str) -> None:
    case = make()
    check(case, METHODS[method](size_of_psi(case)))


@pytest.mark.parametrize("method", EACH_WAY)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exact_methods_equal_a_plain_loop_under_every_optimizer(optimizer: str, method: str) -> None:
    case = example_weights(OPTIMIZERS[optimizer])
    check(case, METHODS[method](size_of_psi(case)))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_touches_nothing(method: str) -> None:
    case = example_weights(OPTIMIZERS["adam"])
    before, kept = torch.get_rng_state(), {name: leaf.clone() for name, leaf in case.phi.items()}
    made = METHODS[method](6)
    first, second = (hg.hypergradient(case.problem, case.phi, made, seed=5) for _ in range(2))
    assert torch.equal(first.grad["weight"], second.grad["weight"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(case.phi["weight"], kept["weight"])
    assert case.phi["weight"].grad is None
    assert not first.grad["weight"].requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_the_space_of_the_bottleneck_gives_the_gradient_of_the_space_of_phi(method: str) -> None:
    case = bottleneck()
    wide = Case(case.problem.composed(), case.phi)
    direct = hg.hypergradient(wide.problem, wide.phi, METHODS[method](size_of_psi(wide)))
    narrow = hg.hypergradient(case.problem, case.phi, METHODS[method](size_of_psi(case)))
    # two sums in different orders, each exact to rounding
    torch.testing.assert_close(vector(narrow.grad), vector(direct.grad), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_leaves_that_require_gradients_are_taken_as_values(method: str) -> None:
    case = example_weights()
    phi = {"weight": torch.nn.Parameter(case.phi["weight"].clone())}
    found = hg.hypergradient(case.problem, phi, METHODS[method](6))
    plain = hg.hypergradient(case.problem, case.phi, METHODS[method](6))
    assert torch.equal(found.grad["weight"], plain.grad["weight"])
    assert phi["weight"].grad is None


@pytest.mark.parametrize("method", METHODS)
def test_float32_keeps_its_dtype_and_its_digits(method: str) -> None:
    case = example_weights()
    truth = vector(unrolled(case.problem, case.phi)[0])
    theta = {name: leaf.float() for name, leaf in case.problem.init.items()}
    narrow = dataclasses.replace(
        case.problem,
        inner=lambda theta, phi, batch: weighted(theta, phi["weight"], X.float(), Y.float()),
        outer=lambda theta, phi: (
            (predict(theta, VALID_X.float()) - VALID_Y.float()).square().mean() + 0.1 * phi["weight"].square().sum()
        ),
        init=theta,
    )
    found = hg.hypergradient(narrow, {"weight": case.phi["weight"].float()}, METHODS[method](6)).grad["weight"]
    assert found.dtype == torch.float32
    # rounding of float32, 6e-8, over four steps and sums of a few numbers
    assert (found.double() - truth).norm() <= 1e-5 * truth.norm()
