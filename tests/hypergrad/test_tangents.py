"""Tangents beside the run: A·y + B·v at the old θ, for many directions at once, the run itself only once."""

from __future__ import annotations

import math

import pytest
import torch

from oracles.problems import OPTIMIZERS, draw, example_weights, fresh_start, maml
from oracles.quadratic import M, N, Quadratic
from sparing import hypergrad as hg
from sparing.hypergrad.forward_mode.tangents import batched_jvp, growth, pushforward, row_norms, start
from sparing.hypergrad.inner.unroll import State, Unroll
from sparing.hypergrad.trees import leaves


def test_batched_jvp_is_value_and_derivatives_and_runs_the_function_once() -> None:
    calls = []

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x**2 * y

    x, y = draw(3, seed=1), draw(3, seed=2)
    rows = (draw(4, 3, seed=3), draw(4, 3, seed=4))
    value, along = batched_jvp(function, (x, y), rows)
    assert len(calls) == 1
    torch.testing.assert_close(value, x**2 * y)
    torch.testing.assert_close(along, 2 * x * y * rows[0] + x**2 * rows[1])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_push_is_the_matrix_of_a_step_at_the_old_weights(momentum: float) -> None:
    case = Quadratic(momentum=momentum, steps=3)
    unroll = Unroll(case.problem(), 0, case.problem().init)
    rows = draw(4, N, seed=5)
    state, tangents = start(unroll, case.x, rows)
    expected = torch.zeros(2 * M, 4, dtype=torch.float64)
    for step in range(3):
        state, tangents = pushforward(unroll, step, state, tangents, case.x, rows, 4)
        expected = case._block() @ expected + torch.cat([-case.eta * case.c, case.c]) @ rows.T
        torch.testing.assert_close(tangents.theta[0], expected[:M].T, rtol=1e-12, atol=1e-13)
        if momentum:
            torch.testing.assert_close(tangents.slots[0][0], expected[M:].T, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.theta[0], case.end(), rtol=1e-12, atol=1e-13)


def test_a_tangent_taken_after_the_step_is_wrong() -> None:
    """Algorithm 1 as printed writes θ first and takes A and B after it, at the new θ: wrong unless g is quadratic."""
    case = example_weights(OPTIMIZERS["sgd"])
    unroll = Unroll(case.problem, 0, case.problem.init)
    rows = {"weight": draw(1, 6, seed=5)}
    state, tangents = start(unroll, case.phi, rows)
    printed_state, printed = state, tangents
    for step in range(4):
        new = unroll.run(case.phi, state=printed_state, first=step, last=step + 1)
        _, printed = pushforward(unroll, step, new, printed, case.phi, rows, 1)
        printed_state = new
        state, tangents = pushforward(unroll, step, state, tangents, case.phi, rows, 1)
    _, d, c = unroll.outer_gradients(state, case.phi)
    right, wrong = (
        sum((a * b[0]).sum() for a, b in zip(d.theta, t.theta, strict=True)) + c[0] @ rows["weight"][0]
        for t in (tangents, printed)
    )
    step = 1e-5
    ends = [
        case.problem.outer(dict(zip(case.problem.init, unroll.run(phi).theta, strict=True)), phi)
        for phi in ({"weight": case.phi["weight"] + sign * step * rows["weight"][0]} for sign in (1, -1))
    ]
    truth = (ends[0] - ends[1]) / (2 * step)
    assert right.item() == pytest.approx(truth.item(), rel=1e-6)
    assert abs(wrong - truth) > 0.01 * abs(truth)


def test_a_start_that_is_phi_has_its_direction_and_a_constant_one_none() -> None:
    case = maml()
    rows = {name: draw(2, *leaf.shape, seed=5) for name, leaf in case.phi.items()}
    _, tangents = start(Unroll(case.problem, 0, case.phi), case.phi, rows)
    torch.testing.assert_close(tangents.theta, list(rows.values()), rtol=0, atol=0)
    assert all(float(part.abs().max()) == 0 for slot in tangents.slots for part in slot)
    constant = example_weights()
    rows = {"weight": draw(2, 6, seed=5)}
    _, tangents = start(Unroll(constant.problem, 0, constant.problem.init), constant.phi, rows)
    assert all(float(part.abs().max()) == 0 for part in leaves(tangents))


def test_a_random_start_has_the_derivative_of_its_scale() -> None:
    case = fresh_start()
    psi = case.problem.through(case.phi)
    unroll = Unroll(case.problem, 2, case.problem.start(psi, 2))
    rows = {"scale": torch.ones(1).double(), "weight": torch.zeros(1, 6).double()}
    state, tangents = start(unroll, psi, rows)
    torch.testing.assert_close(tangents.theta[0][0], state.theta[0] / psi["scale"])
    assert tangents.theta[1].abs().max() == 0


def test_growth_is_the_root_mean_square_over_directions_of_the_weights_alone() -> None:
    tangents = State([torch.tensor([[3.0, 4.0], [0.0, 0.0]])], ([torch.full((2, 2), 1e9)],))
    first = row_norms([torch.tensor([[1.0, 0.0], [0.0, 2.0]])])
    assert first.tolist() == [1.0, 2.0]
    assert growth([row_norms(tangents.theta)], first) == pytest.approx([5 / math.sqrt(5)])
    assert growth([], first) == ()


def test_row_norms_are_over_all_leaves_also_over_numbers() -> None:
    leaves = [torch.tensor([3.0, 1.0]), torch.tensor([[[4.0]], [[0.0]]])]
    assert row_norms(leaves).tolist() == [5.0, 1.0]


def test_growth_omits_a_direction_from_its_beginning_once_it_overflows() -> None:
    first = torch.tensor([1.0, 2.0])
    sizes = [torch.tensor([10.0, 2.0]), torch.tensor([math.inf, 6.0])]
    assert growth(sizes, first) == pytest.approx([1.0, 3.0])
    lost = growth([torch.tensor([10.0, 1.0]), torch.tensor([math.inf, math.nan])], first)
    assert lost[0] == pytest.approx(math.sqrt(101 / 5))
    assert not math.isfinite(lost[1])


class HeavyBall:
    """Its state is θ of the step before, handed on as it is."""

    def start(self, theta, phi):
        return [weight.clone() for weight in theta]

    def update(self, theta, grads, state, step, phi):
        parts = zip(theta, grads, state, strict=True)
        return [w - 0.1 * slope + 0.5 * (w - before) for w, slope, before in parts], list(theta)


@pytest.mark.parametrize("width", [1, 2, None])
def test_in_pieces_an_old_leaf_that_is_a_moment_is_the_recursion_by_hand(width: int | None) -> None:
    """Of g = ‖θ − φ‖²/2 each weight has dθ_{t+1} = dθ_t − 0.1(dθ_t − 1) + 0.5(dθ_t − dθ_{t−1})."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum() / 2, outer=lambda theta, phi: theta.sum(),
        init=torch.zeros(3, dtype=torch.float64), optimizer=HeavyBall(), steps=5,
    )  # fmt: skip
    now = before = 0.0
    for _ in range(5):
        now, before = now - 0.1 * (now - 1) + 0.5 * (now - before), now
    method = hg.ForwardGradient(directions=3, law=hg.Orthonormal(), width=width)
    found = hg.hypergradient(problem, torch.ones(3, dtype=torch.float64), method).grad
    torch.testing.assert_close(found, torch.full((3,), now, dtype=torch.float64), rtol=1e-12, atol=0)
