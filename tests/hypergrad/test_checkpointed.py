"""Checkpointed reverse: the bits of the whole graph, the steps that the schedule says, the bytes that it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from oracles.problems import MOMENTUM, OPTIMIZERS, bilevel, draw, dropout, example_weights, minibatches
from oracles.quadratic import M, Quadratic
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.checkpointed import graph_bytes, work
from sparing.hypergrad.inner.unroll import Unroll

WAYS = [hg.Checkpointed(), *(hg.Checkpointed(states=count) for count in (0, 1, 2, 5)), hg.Checkpointed(memory="1MB")]


@pytest.mark.parametrize("method", WAYS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10])
def test_any_length_and_any_number_of_states_is_exact(method: hg.Checkpointed, steps: int) -> None:
    case = Quadratic(steps=steps, momentum=0.9)
    found = hg.hypergradient(case.problem(), case.x, method)
    torch.testing.assert_close(found.grad, case.hypergradient(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.theta, case.end(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "clipping at work"])
@pytest.mark.parametrize("make", [example_weights, dropout, minibatches])
def test_replayed_steps_see_the_same_masks_and_batches(make: Any, optimizer: str) -> None:
    """A replay that drew again would be off by percents; sums over steps in another order by roundings."""
    case = make(OPTIMIZERS[optimizer])
    whole = hg.hypergradient(*case, hg.Reverse(), seed=4)
    for method in WAYS:
        found = hg.hypergradient(*case, method, seed=4)
        torch.testing.assert_close(found.grad, whole.grad, rtol=1e-13, atol=1e-15)
        assert torch.equal(found.value, whole.value)


def counted(steps: int, method: Any) -> int:
    """Calls of the inner loss."""
    case, calls = example_weights(), []

    def inner(theta: Any, phi: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return case.problem.inner(theta, phi, batch)

    problem = dataclasses.replace(case.problem, inner=inner, steps=steps)
    hg.hypergradient(problem, case.phi, method)
    return len(calls) - 1  # one call looks at the problem before the run


@pytest.mark.parametrize("states", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("steps", [1, 2, 6, 13])
def test_the_steps_taken_are_those_of_the_optimal_schedule(states: int, steps: int) -> None:
    """Each step once with its graph, and as many without as the schedule advances."""
    assert counted(steps, hg.Checkpointed(states=states)) == steps + work(steps, min(states, steps - 1))


def test_the_square_root_schedule_runs_every_step_at_most_twice() -> None:
    assert counted(16, hg.Checkpointed()) == 16 + 12  # the last stretch needs no first run
    assert counted(16, hg.Reverse()) == 16


def held(method: Any, steps: int) -> int:
    """Largest number of bytes saved for backward at one time."""
    width = 64
    problem = bilevel(
        hg.SGD(lr=0.01),
        inner=lambda theta, phi, batch: torch.tanh(theta["w"] * phi["x"]).square().sum(),
        outer=lambda theta, phi: theta["w"].sum(),
        init={"w": draw(width, seed=1)},
        steps=steps,
    )
    live = peak = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal live, peak
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            live += self.size
            peak = max(peak, live)

        def __del__(self) -> None:
            nonlocal live
            live -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        hg.hypergradient(problem, {"x": draw(width, seed=2)}, method)
    return peak


def test_memory_grows_with_t_in_reverse_with_its_root_under_checkpoints_and_not_at_all_by_states() -> None:
    assert held(hg.Reverse(), 64) > 3.5 * held(hg.Reverse(), 16)
    assert held(hg.Checkpointed(), 64) < 2.5 * held(hg.Checkpointed(), 16)
    assert held(hg.Checkpointed(states=3), 64) == held(hg.Checkpointed(states=3), 16)
    assert held(hg.Truncated(steps=4), 64) == held(hg.Truncated(steps=4), 16)


def test_graph_bytes_are_those_of_one_step_and_what_is_held_anyway_is_not_counted() -> None:
    """g = ½θ·φ·θ saves φ·θ-sized products: one step of M = 1000 floats keeps some vectors, not θ nor φ."""
    size = 1000

    def measured(width: int) -> int:
        problem = hg.Bilevel(
            inner=lambda theta, phi, batch: torch.exp(theta * phi).sum(),
            outer=lambda theta, phi: theta.sum(),
            init=torch.zeros(width, dtype=torch.float64),
            optimizer=MOMENTUM,
            steps=2,
        )
        phi = torch.zeros(width, dtype=torch.float64)
        unroll = Unroll(problem, 0, problem.init)
        return graph_bytes(unroll, phi, unroll.start(phi))

    assert measured(2 * size) - measured(size) == pytest.approx(measured(size), rel=0.01)  # linear, no constant
    vectors = measured(size) / (8 * size)
    assert 1 <= vectors <= 4  # exp(θφ) for both derivatives, its product with the cotangent; neither θ nor φ


def test_the_plan_for_a_budget_fits_into_it() -> None:
    case = Quadratic(steps=20)
    unroll = Unroll(case.problem(), 0, case.problem().init)
    state = unroll.start(case.x)
    graph = graph_bytes(unroll, case.x, state)
    for extra in (0, 3, 100):
        budget = graph + (2 + extra) * 8 * M
        leaf, states = hg.Checkpointed(memory=budget).schedule(unroll, case.x, state)
        assert leaf == 1
        assert states == min(extra, 19)
    with pytest.raises(UserError, match=r"memory: got .* B; the graph of one step"):
        hg.Checkpointed(memory=graph + 8 * M).schedule(unroll, case.x, state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"states": -1}, "states: got -1"),
        ({"states": "log"}, "states: got log"),
        ({"memory": "lots"}, "lots"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        hg.Checkpointed(**settings)
