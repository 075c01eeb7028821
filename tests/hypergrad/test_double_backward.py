"""Tangents by two backward passes: those of torch.func to rounding, and torch.func's where autograd has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import hypergrad_small as small
from torch import Tensor
from torch.nn import functional as F

from oracles.problems import OPTIMIZERS, X, bilevel, bottleneck, dropout, example_weights, fresh_start, nested
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.forward_mode import double_backward, tangents

CASES = {name: lambda name=name: example_weights(OPTIMIZERS[name]) for name in OPTIMIZERS}
CASES |= {make.__name__: make for make in (nested, bottleneck, dropout, fresh_start)}


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_has_the_weights_of_torch_func(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, method = CASES[name](), hg.ForwardGradient(directions=3, width=2)
    asked: list[object] = []
    slow = tangents.batched_jvp
    monkeypatch.setattr(tangents, "batched_jvp", lambda *a: asked.append(a) or slow(*a))
    found = hg.hypergradient(case.problem, case.phi, method, seed=1).report.weights
    # a start that depends on φ is the only thing left to torch.func
    assert len(asked) == callable(case.problem.init)
    with small.by("torch.func"):
        expected = hg.hypergradient(case.problem, case.phi, method, seed=1).report.weights
    assert len(asked) > 4
    # sums of some ten terms in another order
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Uneven(torch.autograd.Function):
    """The identity with slopes x.sum(), so that its "second derivatives" are not symmetric."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].sum()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].sum()


def test_a_function_of_the_user_is_left_to_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = lambda theta, phi, batch: (  # noqa: E731
        torch.sigmoid(phi["weight"]) * (Uneven.apply(torch.tanh(X @ theta["hidden"])) @ theta["out"]) ** 2
    ).mean()
    problem, phi = bilevel(hg.SGD(lr=0.1), inner=inner), {"weight": X[:, 0].clone()}
    exact = vector(unrolled(problem, phi)[0])
    found = vector(hg.hypergradient(problem, phi, hg.Forward()).grad)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)
    monkeypatch.setattr(double_backward, "torchs_own", lambda ends: True)
    wrong = vector(hg.hypergradient(problem, phi, hg.Forward()).grad)
    assert (wrong - exact).norm() > 1e-3 * exact.norm()


def test_what_has_neither_second_derivative_nor_forward_mode_is_refused_in_a_line() -> None:
    inner = lambda theta, phi, batch: (  # noqa: E731
        (F.pdist(theta["hidden"]) * phi["weight"][0]).sum() + theta["out"].square().sum()
    )
    with pytest.raises(UserError, match=r"inner: got \S*pdist"):
        hg.hypergradient(bilevel(hg.SGD(lr=0.1), inner=inner), {"weight": X[:, 0].clone()}, hg.Forward())


class Once(torch.autograd.Function):
    """tanh, as fused kernels are written: a first derivative alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class Squashed:
    """An optimizer of the user's with such a kernel in its update."""

    def start(self, theta: Any, phi: Any) -> Any:
        return ()

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return [weight - 0.1 * Once.apply(grad) for weight, grad in zip(theta, grads, strict=True)], slots


def test_a_derivative_that_torch_takes_for_zero_is_not_taken_from_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, phi = bilevel(Squashed()), {"weight": X[:, 0].clone()}
    with pytest.raises(UserError, match=r"autograd\.Function"):
        hg.hypergradient(problem, phi, hg.Forward())
    exact = vector(hg.hypergradient(problem, phi, hg.Reverse()).grad)
    monkeypatch.setattr(double_backward, "torchs_own", lambda ends: True)
    wrong = vector(hg.hypergradient(problem, phi, hg.Forward()).grad)
    assert (wrong - exact).norm() > 0.1 * exact.norm()


def test_masks_are_the_same_where_the_second_derivative_is_found_missing_after_they_were_drawn() -> None:
    """Weights of classes have a forward derivative alone, so the step is made twice, from the same place."""

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        logits = F.dropout(torch.tanh(X @ theta["hidden"]), 0.5)
        return F.cross_entropy(logits, torch.tensor([0, 2, 1, 1, 0, 2]), weight=phi.exp()) + theta["out"].square().sum()

    problem, phi, step = bilevel(hg.SGD(lr=0.2), inner=inner), torch.zeros(3, dtype=torch.float64), 1e-5
    found = hg.hypergradient(problem, phi, hg.Forward(), seed=2).grad
    ends = [
        [problem.outer(hg.solve(problem, phi + sign * step * row, seed=2), phi) for sign in (1, -1)]
        for row in torch.eye(3, dtype=torch.float64)
    ]
    truth = torch.stack([(high - low) / (2 * step) for high, low in ends])
    # µ² = 1e-10 and rounding over 1e-5, relative to slopes of about .01
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: x.exp().add_(1).mul_(x),  # changed in place after its value was saved
        lambda x: x * x.detach().sum().item(),
        lambda x: x if float(x.detach().sum()) > 0 else 2 * x,
        lambda x: x * torch.from_numpy(x.detach().numpy().copy()),
        lambda x: F.embedding(torch.tensor([0, 1, 2, 2]), x.T, padding_idx=2).sum(0) * x,
        lambda x: torch.func.grad(lambda z: z.pow(3).sum())(x),
    ],
    ids=["in place", "item", "branch", "numpy", "padding", "gradient inside"],
)
def test_what_a_loss_does_with_values_is_equal_to_the_dense_answer_or_refused(layer: Any) -> None:
    inner = lambda theta, phi, batch: (  # noqa: E731
        torch.sigmoid(phi["weight"]) * (layer(torch.tanh(X @ theta["hidden"])) @ theta["out"]) ** 2
    ).mean()
    problem, phi = bilevel(hg.SGD(lr=0.01, momentum=0.5), inner=inner), {"weight": X[:, 0].clone()}
    try:
        exact = vector(unrolled(problem, phi)[0])
    except RuntimeError as failure:  # torch cannot differentiate it at all
        with pytest.raises((UserError, RuntimeError), match=str(failure)[:20]):
            hg.hypergradient(problem, phi, hg.Forward())
        return
    found = vector(hg.hypergradient(problem, phi, hg.Forward()).grad)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)


def test_a_function_along_rows_is_its_jacobian_times_them() -> None:
    x, y = X[0].clone(), X[1].clone()
    rows = (X[2:5], X[1:4])
    function = lambda x, y: {"product": x * y.exp(), "same": x, "free": torch.ones(3, dtype=torch.float64)}  # noqa: E731
    found = double_backward.along(function, (x, y), rows)
    assert found is not None
    value, moved = found
    torch.testing.assert_close(value, function(x, y), rtol=0, atol=0)
    expected = rows[0] * y.exp() + x * y.exp() * rows[1]
    torch.testing.assert_close(moved["product"], expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(moved["same"], rows[0], rtol=0, atol=0)
    assert moved["free"].shape == (3, 3)
    assert not moved["free"].any()


def test_the_benchmark_of_small_steps_times_both_ways_and_goes_on_where_it_stopped(tmp_path: Any) -> None:
    out, before = tmp_path / "rows.json", tangents.gradient_along
    first = small.fill(out, rounds=1, steps=2)
    assert len(first) == 3 * 2 * 2
    assert small.fill(out, rounds=1, steps=2) == first  # nothing is left
    assert tangents.gradient_along is before
