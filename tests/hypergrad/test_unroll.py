"""The inner run: three ways to take a step that agree, randomness that belongs to the step, generators left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.func import jvp

from oracles.problems import OPTIMIZERS, PROBLEMS, draw, dropout, example_weights, minibatches
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.inner.checks import check_problem
from sparing.hypergrad.inner.unroll import State, Unroll, reproducible, rng_states, same_rng_states, vjp
from sparing.hypergrad.trees import leaves


def unroll_of(make: Any, optimizer: str = "adam", seed: int = 3) -> tuple[Unroll, Any]:
    case = make(OPTIMIZERS[optimizer])
    return Unroll(case.problem, seed, case.problem.init), case.phi


def watched(state: State) -> State:
    return State([w.clone().requires_grad_() for w in state.theta], state.slots)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [example_weights, dropout, minibatches])
def test_a_step_is_the_same_in_each_of_its_forms(make: Any, optimizer: str) -> None:
    unroll, phi = unroll_of(make, optimizer)
    state = unroll.run(phi, last=2)
    with unroll.at(2) as batch:
        plain = leaves(unroll.plain_step(2, state, phi, batch))
    with unroll.at(2) as batch:
        graph = leaves(unroll.graph_step(2, watched(state), phi, batch))
    with unroll.at(2) as batch:
        grads, _ = unroll.inner_gradient(batch, state.theta, phi)
        pure = leaves(unroll.problem.optimizer.update(state.theta, grads, state.slots, 2, phi))
    assert not any(tensor.requires_grad for tensor in plain)
    for one, two, three in zip(plain, graph, pure, strict=True):
        # functorch orders some sums otherwise
        torch.testing.assert_close(one, two.detach(), rtol=0, atol=0)
        torch.testing.assert_close(one, three, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_a_run_in_pieces_is_the_run(make: Any) -> None:
    case = make()
    psi = case.problem.through(case.phi) if case.problem.through else case.phi
    unroll = Unroll(case.problem, 3, case.problem.start(psi, 3))
    whole = unroll.run(psi)
    half = unroll.run(psi, last=1)
    for one, two in zip(leaves(whole), leaves(unroll.run(psi, state=half, first=1)), strict=True):
        assert torch.equal(one, two)
    torch.testing.assert_close(vector(whole.theta), vector(unrolled(*case, seed=3)[2]), rtol=1e-13, atol=1e-15)


def test_randomness_belongs_to_seed_and_step() -> None:
    unroll, _ = unroll_of(dropout)
    other, _ = unroll_of(dropout, seed=4)

    def drawn(one: Unroll, step: int) -> list[float]:
        with one.at(step):
            return torch.rand(3).tolist()

    assert drawn(unroll, 1) == drawn(unroll, 1)
    assert drawn(unroll, 1) != drawn(unroll, 2)
    assert drawn(unroll, 1) != drawn(other, 1)


@pytest.mark.parametrize("begin", [0, 1, 3])
def test_masks_are_those_of_forward_mode_whenever_dropout_begins(begin: int) -> None:
    """A transposed activation gets other masks in plain torch; only the first step is checked beforehand."""
    x = draw(5, 3, seed=1)

    def inner(theta: Any, phi: Any, batch: int) -> torch.Tensor:
        hidden = (theta["w"] @ x.T).T
        return ((torch.dropout(hidden, 0.5, True) if batch >= begin else hidden).square() * phi).sum()

    problem = hg.Bilevel(
        inner=inner, outer=lambda theta, phi: theta["w"].sum(), init={"w": draw(4, 3, seed=2)},
        optimizer=hg.SGD(lr=0.01), steps=4, batches=list(range(4)),
    )  # fmt: skip
    phi = draw(5, 4, seed=3).abs()
    assert check_problem(problem, phi, 0).draws == (begin == 0)
    exact = hg.hypergradient(problem, phi, hg.Reverse()).grad
    forward = hg.hypergradient(problem, phi, hg.ForwardGradient(directions=20, law=hg.Orthonormal()))
    torch.testing.assert_close(forward.grad, exact, rtol=1e-10, atol=1e-12)
    for draws in (False, True):  # what is known beforehand spares time and changes nothing
        unroll = Unroll(problem, 0, problem.init, draws)
        torch.testing.assert_close(unroll.run(phi).theta[0], forward.theta["w"], rtol=1e-13, atol=1e-15)


def test_a_loss_that_draws_nothing_runs_once_and_without_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    unroll, phi = unroll_of(example_weights)
    monkeypatch.setattr("sparing.hypergrad.inner.unroll.ModeParity", None)
    unroll.run(phi)
    with pytest.raises(TypeError):
        unroll_of(dropout)[0].run(phi)


def test_the_global_generator_is_put_back_also_after_a_failure() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with reproducible(0, "here"):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_devices_in_use_are_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are fake: two generators of the CPU in their place."""
    devices = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    before = rng_states()
    drawn = []
    for _ in range(2):
        with reproducible(0, "here"):
            drawn.append(torch.rand(3, generator=devices[1]))
    assert torch.equal(*drawn)
    assert same_rng_states(rng_states(), before)
    torch.rand(1, generator=devices[1])
    assert not same_rng_states(rng_states(), before)


def test_a_device_touched_for_the_first_time_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    before = rng_states()

    def touch() -> None:
        with reproducible(0, "here"):
            monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))

    with pytest.raises(UserError, match=r"the first to touch a CUDA device; .*; call `torch.cuda.init\(\)` first"):
        touch()
    # what was drawn by it is not known
    assert not same_rng_states(rng_states(), before)


def test_outer_gradients_are_both_partial_derivatives() -> None:
    case = example_weights()
    unroll = Unroll(case.problem, 0, case.problem.init)
    state = unroll.start(case.phi)
    value, d, c = unroll.outer_gradients(state, case.phi)
    torch.testing.assert_close(c[0], 0.2 * case.phi["weight"])
    turn = [draw(*leaf.shape, seed=9) for leaf in state.theta]
    along = jvp(
        lambda *theta: case.problem.outer(dict(zip(case.problem.init, theta, strict=True)), case.phi),
        tuple(state.theta), tuple(turn),
    )[1]  # fmt: skip
    torch.testing.assert_close(sum((a * b).sum() for a, b in zip(d.theta, turn, strict=True)), along)
    assert not value.requires_grad


def test_vjp_is_zero_where_nothing_reaches() -> None:
    x, spare = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    assert [part.tolist() for part in vjp((2 * x).sum(), [x, spare])] == [[2, 2], [0, 0, 0]]
    assert [part.tolist() for part in vjp(torch.tensor(1.0), [x])] == [[0, 0]]
    constant = torch.ones(2)
    found = vjp([3 * x, constant], [x], [torch.tensor([1.0, 2.0]), torch.ones(2)])
    assert found[0].tolist() == [3, 6]


@pytest.mark.parametrize("method", [None, hg.Checkpointed(states=1), hg.Reverse()], ids=str)
def test_forward_mode_is_on_again_after_a_loss_that_leaves_its_own_no_grad(method: Any) -> None:
    case = example_weights()

    def path(step: int, theta: Any, phi: Any) -> torch.Tensor:
        with torch.no_grad():
            target = theta["out"].sum()
        return (theta["out"].sum() - target - 1).square()

    problem = dataclasses.replace(case.problem, path=path)
    hg.solve(problem, case.phi) if method is None else hg.hypergradient(problem, case.phi, method)
    assert torch._C._is_fwd_grad_enabled()


EVERY = [
    hg.Reverse(), hg.Checkpointed(states=1), hg.Forward(),
    hg.ForwardGradient(directions=3, law=hg.Orthonormal(), width=1),
    hg.ZerothOrder(directions=3, law=hg.Orthonormal(), step=1e-2),
]  # fmt: skip


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_losses_along_a_run_in_bfloat16_are_summed_beyond_256(method: Any) -> None:
    """Each of 400 states is φ itself after one step of rate 1, so that the sum is 400 Σφ/3."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi.to(theta.dtype)).square().sum() / 2,
        outer=lambda theta, phi: theta.float().sum() * 0, path=lambda step, theta, phi: theta.float().sum() / 3,
        init=torch.zeros(3, dtype=torch.bfloat16), optimizer=hg.SGD(lr=1.0), steps=400,
    )  # fmt: skip
    phi = torch.ones(3, dtype=torch.float64)
    found = hg.hypergradient(problem, phi, method)
    assert found.value.item() == pytest.approx(400, rel=1e-5)
    # θ has steps of 8e-3, of which a difference of 2e-2 may hold two or three
    rel = 0.5 if isinstance(method, hg.ZerothOrder) else 1e-2
    assert found.grad.tolist() == pytest.approx([400 / 3] * 3, rel=rel)


@pytest.mark.parametrize(
    "method", [hg.Reverse(), hg.Checkpointed(states="sqrt"), hg.Truncated(steps=899), hg.Forward()], ids=str
)
@pytest.mark.parametrize("through", [None, lambda phi: phi * 1.0])
def test_a_gradient_for_phi_of_16_bits_is_the_sum_over_all_steps(through: Any, method: Any) -> None:
    """Each of 900 steps adds 1/1024; a sum in bfloat16 stops at 256/1024."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: -(theta * phi.float()).sum(), outer=lambda theta, phi: theta.sum(),
        init=torch.zeros(3), optimizer=hg.SGD(lr=1 / 1024), steps=900, through=through,
    )  # fmt: skip
    found = hg.hypergradient(problem, torch.ones(3, dtype=torch.bfloat16), method).grad
    assert found.dtype == torch.bfloat16
    assert found.tolist() == pytest.approx([900 / 1024] * 3, rel=1e-2)  # bfloat16 has three digits


def test_a_gradient_that_float16_cannot_hold_is_told_from_one_that_is_not_finite() -> None:
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: -(theta * phi.float()).sum(), outer=lambda theta, phi: 200 * theta.sum(),
        init=torch.zeros(3), optimizer=hg.SGD(lr=1.0), steps=900,
    )  # fmt: skip
    with pytest.raises(RunError, match="larger than phi's dtype can hold"):
        hg.hypergradient(problem, torch.ones(3, dtype=torch.float16), hg.Reverse())
    assert hg.hypergradient(problem, torch.ones(3), hg.Reverse()).grad.tolist() == [180_000.0] * 3


@pytest.mark.parametrize("extra", [{"guides": (hg.Truncated(steps=1),)}, {"control": torch.zeros(3)}], ids=list)
def test_guides_and_control_variates_need_more_than_16_bits(extra: dict[str, Any]) -> None:
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi.float()).square().sum(), outer=lambda theta, phi: theta.sum(),
        init=torch.zeros(3), optimizer=hg.SGD(lr=0.1), steps=4,
    )  # fmt: skip
    method = hg.ForwardGradient(directions=2, **extra)
    with pytest.raises(UserError, match=rf"{next(iter(extra))}: got φ of torch.bfloat16; small systems of equations"):
        hg.hypergradient(problem, torch.ones(3, dtype=torch.bfloat16), method)


@pytest.mark.parametrize("method", EVERY, ids=str)
@pytest.mark.parametrize("blank", [lambda phi: torch.zeros((), dtype=torch.float64), lambda phi: (phi * 0).sum()])
def test_a_step_whose_loss_ignores_the_weights_is_no_step(blank: Any, method: Any) -> None:
    def inner(theta: Any, phi: Any, batch: bool) -> torch.Tensor:
        return (theta - phi).square().sum() / 2 if batch else blank(phi)

    def problem(batches: list[bool]) -> hg.Bilevel:
        return hg.Bilevel(
            inner=inner, outer=lambda theta, phi: theta.square().sum(), init=torch.zeros(3, dtype=torch.float64),
            optimizer=hg.SGD(lr=0.1), steps=len(batches), batches=batches,
        )  # fmt: skip

    phi = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    found = hg.hypergradient(problem([True, False, True, False]), phi, method).grad
    share = 1 - 0.9**2
    torch.testing.assert_close(found, 2 * share**2 * phi, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [hg.HessianFree(), hg.FiniteDifference(), hg.ConjugateGradient()], ids=str)
def test_at_a_last_loss_that_ignores_the_weights_an_implicit_method_has_no_slope(method: Any) -> None:
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum() if batch else torch.zeros(()).double(),
        outer=lambda theta, phi: theta.sum() + 2 * phi.sum(), init=torch.zeros(2, dtype=torch.float64),
        optimizer=hg.SGD(lr=0.1), steps=2, batches=[True, False],
    )  # fmt: skip
    found = hg.hypergradient(problem, torch.ones(2, dtype=torch.float64), method).grad
    assert found.tolist() == [2, 2]
