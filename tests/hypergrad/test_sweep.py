"""One pass over the directions: the same weights in any chunking, an exact tail, memory that does not see T."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from oracles.problems import draw, dropout, example_weights
from oracles.quadratic import N, Quadratic
from sparing import hypergrad as hg
from sparing.hypergrad.forward_mode.sweep import sweep
from sparing.hypergrad.forward_mode.tangents import pushforward, start
from sparing.hypergrad.inner.unroll import Unroll
from sparing.hypergrad.trees import leaves

ROWS = draw(5, N, seed=5)


def swept(case: Quadratic, numbers: Any = range(5), **settings: Any) -> Any:
    unroll = Unroll(case.problem(), 0, case.problem().init)
    return sweep(unroll, case.x, case.x, lambda which: ROWS[list(which)], numbers, **settings)


@pytest.mark.parametrize("tail", [0, 1, 5, 12])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_head_and_tail_add_up(tail: int, momentum: float) -> None:
    """w = (d·Z_T − what the tail adds exactly)·v, also through the momentum at the cut."""
    case = Quadratic(momentum=momentum)
    found = swept(case, tail=tail)
    whole = case.hypergradient() - case.direct
    known = case.hypergradient(tail) - case.direct if tail else torch.zeros(N, dtype=torch.float64)
    torch.testing.assert_close(found.known[0], known, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.weights, ROWS @ (whole - known), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found.finish.direct[0], case.direct)
    assert len(found.growth) == 12 - tail


def test_growth_is_that_of_the_matrices() -> None:
    case = Quadratic()
    sizes = [(case.jacobian(t + 1) @ ROWS.T).norm() / ROWS.norm() for t in range(12)]
    for chunk in (None, 2):  # rows of other lengths in each chunk: the sums are over all of them
        assert swept(case, chunk=chunk).growth == pytest.approx([float(size) for size in sizes], rel=1e-10)


def test_some_directions_or_none_can_be_taken() -> None:
    case = Quadratic(steps=4)
    whole = swept(case)
    torch.testing.assert_close(swept(case, range(1, 5, 2)).weights, whole.weights[[1, 3]], rtol=1e-12, atol=1e-13)
    none = swept(case, range(0))
    assert none.weights.shape == (0,)
    assert torch.equal(none.finish.value, whole.finish.value)


def calls(method: Any) -> int:
    case, seen = example_weights(), []

    def inner(theta: Any, phi: Any, batch: Any) -> torch.Tensor:
        seen.append(1)
        return case.problem.inner(theta, phi, batch)

    hg.hypergradient(dataclasses.replace(case.problem, inner=inner), case.phi, method)
    return len(seen) - 1  # one call looks at the problem before the run


def test_the_run_is_made_once_for_a_chunk_and_once_again_for_each_further_one() -> None:
    steps = 4
    assert calls(hg.ForwardGradient(directions=6)) == steps
    assert calls(hg.ForwardGradient(directions=6, chunk=2)) == 3 * steps
    assert calls(hg.ForwardGradient(directions=6, tail=3)) == steps
    # the tail is reversed once for all chunks
    assert calls(hg.ForwardGradient(directions=6, chunk=2, tail=3)) == 3 * (steps - 3) + 3


def test_nothing_of_the_steps_before_is_kept_along_the_head() -> None:
    """Memory constant in T: after each step only its own state and tangents are alive, and they have no history."""
    case = dropout()
    unroll = Unroll(case.problem, 0, case.problem.init)
    rows = {"weight": draw(3, 6, seed=5)}
    state, tangents = start(unroll, case.phi, rows)
    seen = []
    for step in range(4):
        state, tangents = pushforward(unroll, step, state, tangents, case.phi, rows, 3)
        now = [*leaves(state), *leaves(tangents)]
        assert not any(tensor.requires_grad for tensor in now)
        seen.append([weakref.ref(tensor) for tensor in now])
        del now
    assert [sum(ref() is not None for ref in refs) for refs in seen] == [0, 0, 0, len(seen[-1])]
