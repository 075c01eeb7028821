"""Slope, curvature, trace and eigenpairs against the dense Hessian in float64."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.scans.curvature import along, estimate, gradient, hessian_trace, top_eigenpairs
from sparing.vectors import flatten, like

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Norm(nn.BatchNorm1d):
    """Batch norm written out, for the oracle: torch.func's second derivative of the fused one is wrong in training."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = (x.mean(0), x.var(0, correction=0)) if self.training else (self.running_mean, self.running_var)
        return (x - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias


def net(*, norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small smooth classifier, so that the Hessian is not that of the last layer alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(5)] if norm else []
        model = nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).to(dtype)
        if norm:
            model[1].running_mean.normal_()
            model[1].running_var.uniform_(0.5, 2)
    return model


def data(dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(x.split(8), torch.randint(0, 3, (24,), generator=generator).split(8), strict=True))


def dense(model: nn.Module, batches: list[Batch], mode: str = "eval") -> tuple[Tensor, Tensor]:
    """Gradient (d,) and Hessian (d, d) of the mean loss by torch.func, dropout off."""
    params = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    rest = {name: value.detach().clone() for name, value in model.named_buffers()}
    rest |= {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}
    oracle = copy.deepcopy(model).eval()
    if isinstance(oracle[1], nn.BatchNorm1d):
        oracle[1].__class__ = Norm
        oracle[1].train(mode == "batch")

    def mean(flat: Tensor) -> Tensor:
        at = like(flat, params)
        return torch.stack([F.cross_entropy(functional_call(oracle, at | rest, (x,)), y) for x, y in batches]).mean()

    flat = flatten(params)
    return grad(mean)(flat), hessian(mean)(flat)


def state(model: nn.Module) -> tuple[Any, ...]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [(module.training, getattr(module, "track_running_stats", None)) for module in model.modules()]
    return tensors, flags, [value.grad for value in model.parameters()]


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return all(first[0][name].equal(second[0][name]) for name in first[0]) and first[1:] == second[1:]


CASES = [(False, "eval"), (True, "eval"), (True, "batch")]


@pytest.mark.parametrize(("norm", "mode"), CASES)
def test_all_four_equal_the_dense_hessian(norm: bool, mode: Any) -> None:
    model, batches = net(norm=norm).train(), data()
    slope, matrix = dense(model, batches, mode)
    before = state(model)
    params = {name: value.detach() for name, value in model.named_parameters()}
    # Both sides differentiate in float64, in another order of operations: 1e-10 of values near 1
    torch.testing.assert_close(flatten(gradient(model, loss, batches, mode=mode)), slope, rtol=1e-10, atol=1e-12)
    d = torch.randn(len(slope), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = along(model, loss, batches, like(d, params), mode=mode)
    assert got[0] == pytest.approx((slope @ d).item(), rel=1e-9)
    assert got[1] == pytest.approx((d @ matrix @ d).item(), rel=1e-9)
    values, vectors = torch.linalg.eigh(matrix)
    pairs = top_eigenpairs(model, loss, batches, 3, tolerance=1e-10, mode=mode)
    assert [value for value, _ in pairs] == pytest.approx(values.flip(0)[:3].tolist(), rel=1e-9)
    for at, (_, vector) in enumerate(pairs, 1):
        assert abs((flatten(vector) @ vectors[:, -at]).item()) == pytest.approx(1, rel=1e-8)
    found = hessian_trace(model, loss, batches, samples=100, seed=0, mode=mode)
    # Closed-form error of Hutchinson's estimate: variance 2 Σ_{i≠j} H_ij² a probe. 4 σ, and the error told is that one
    sigma = math.sqrt(2 * (matrix.square().sum() - matrix.diagonal().square().sum()).item() / 100)
    assert abs(found.value - matrix.trace().item()) < 4 * sigma
    assert found.error == pytest.approx(
        sigma, rel=0.5
    )  # the deviation of 100 draws is known to about 7 %, more with heavy tails
    assert same(before, state(model))


def test_curvature_along_a_line_is_the_second_difference() -> None:
    model, batches = net().eval(), data()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    d = {name: torch.ones_like(value) for name, value in start.items() if name.startswith("0.")}  # some stay

    def at(step: float) -> float:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name] + step * d[name] if name in d else start[name])
            return sum(loss(model, batch).item() for batch in batches) / len(batches)

    step = 1e-4  # truncation ~ step², rounding ~ 1e-16 / step²: both near 1e-8
    second = (at(step) - 2 * at(0) + at(-step)) / step**2
    first = (at(step) - at(-step)) / (2 * step)
    at(0)
    slope, bend = along(model, loss, batches, d)
    assert slope == pytest.approx(first, rel=1e-6)
    assert bend == pytest.approx(second, abs=1e-6)


@pytest.mark.parametrize(("norm", "mode"), CASES)
def test_one_batch_is_run_once_for_all_products(norm: bool, mode: Any) -> None:
    model, (first, *_) = net(norm=norm), data()
    runs: list[int] = []

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        runs.append(1)
        return loss(model, batch)

    _, matrix = dense(model, [first], mode)
    values, size = torch.linalg.eigvalsh(matrix).flip(0), len(matrix)
    pairs = top_eigenpairs(model, counted, [first], 3, tolerance=1e-10, mode=mode)
    assert [value for value, _ in pairs] == pytest.approx(values[:3].tolist(), rel=1e-9)
    found = hessian_trace(model, counted, [first], samples=4, seed=0, mode=mode)
    signs = [
        torch.randint(0, 2, (size,), generator=stream(0, "valley", "trace", at)).double() * 2 - 1 for at in range(4)
    ]
    assert found.value == pytest.approx(sum((v @ matrix @ v).item() for v in signs) / 4, rel=1e-9)
    assert len(runs) == 2  # once for the eigenvalues, once for the trace


def test_a_diagonal_hessian_needs_one_probe() -> None:
    """v² = 1, so that random signs read a diagonal exactly; and eigenpairs of it are known."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64))})
    scales = torch.tensor([1.0, 4.0, 0.25, 2.0], dtype=torch.float64)
    quadratic = lambda model, batch: 0.5 * (batch * model["w"].square()).sum()  # noqa: E731
    found = hessian_trace(model, quadratic, [scales], samples=3)
    assert found.value == pytest.approx(7.25, rel=1e-12)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.interval == pytest.approx((7.25, 7.25))
    value, vector = top_eigenpairs(model, quadratic, [scales], 1)[0]
    assert value == pytest.approx(4.0)
    torch.testing.assert_close(vector["w"], torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64))


def test_a_linear_loss_has_no_curvature() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    slope, bend = along(
        model, lambda model, x: model(x).sum(), [torch.ones(1, 3).double()], {"weight": torch.ones(1, 3)}
    )
    assert (slope, bend) == (3.0, 0.0)


def test_frozen_parameters_are_constants_and_seeds_repeat() -> None:
    model, batches = net(), data()
    model[0].requires_grad_(False)
    slope, matrix = dense(model, batches)
    assert list(gradient(model, loss, batches)) == ["3.weight", "3.bias"]
    torch.testing.assert_close(flatten(gradient(model, loss, batches)), slope, rtol=1e-10, atol=1e-12)
    first, again, other = (hessian_trace(model, loss, batches, samples=8, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.value != other.value
    one, two = (top_eigenpairs(model, loss, batches, 1)[0] for _ in range(2))
    assert one[0] == two[0]
    assert all(one[1][name].equal(two[1][name]) for name in one[1])
    assert one[0] == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-3)
    refused(r"no parameter of that name has gradients", along, model, loss, batches, {"0.weight": torch.ones(5, 4)})


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.RMSNorm(5)], ids=lambda norm: type(norm).__name__
)
def test_norm_layers_have_their_curvature(norm: nn.Module) -> None:
    """Against differences of gradients; torch.func is no oracle here: it takes the statistics for constants."""
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    d = {name: torch.randn(value.shape, generator=generator, dtype=torch.float64) for name, value in start.items()}

    def at(step: float) -> Tensor:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name] + step * d[name])
        return flatten(gradient(model, loss, data()))

    step = 1e-5  # truncation ~ step², rounding ~ 1e-16 / step: both near 1e-10
    bend = ((at(step) - at(-step)) / (2 * step)) @ flatten(d)
    at(0.0)
    assert along(model, loss, data(), d)[1] == pytest.approx(bend.item(), rel=1e-6)


def test_a_language_model_of_transformers_tied_weights_and_all() -> None:
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=2, vocab_size=11, n_positions=8, **ends)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    batches = [torch.arange(12).view(2, 6) % 11, torch.arange(12).view(2, 6) * 5 % 11]
    of = lambda model, ids: model(input_ids=ids, labels=ids).loss  # noqa: E731
    value, vector = top_eigenpairs(model, of, batches, 1)[0]
    assert "lm_head.weight" not in vector
    slope, bend = along(model, of, batches, vector)
    assert bend == pytest.approx(value, rel=1e-3)  # the asked tolerance is 1e-4, the loss is in float32
    direct = gradient(model, of, batches)
    assert slope == pytest.approx((flatten(direct).double() @ flatten(vector).double()).item(), rel=1e-4)


def test_a_mean_of_two_has_students_interval() -> None:
    found = estimate([1.0, 3.0])
    assert (found.value, found.error, found.samples) == (2.0, 1.0, 2)
    assert found.interval == pytest.approx((2 - 12.7062047, 2 + 12.7062047), rel=1e-7)  # t table, one degree of freedom
    assert math.isnan(estimate([1.0]).error)


def _detached(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch).detach()


def _rows(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _nan(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch) * math.nan


@pytest.mark.parametrize(("bad", "match"), [(_detached, "not detached"), (_rows, "shape"), (_nan, "nan")])
@pytest.mark.parametrize("call", [gradient, hessian_trace, top_eigenpairs])
def test_a_loss_without_a_slope_is_refused(call: Callable[..., Any], bad: Any, match: str) -> None:
    refused(match, call, net(), bad, data())


def test_what_cannot_be_asked_is_refused() -> None:
    model, batches = net(), data()
    refused("batches: got none", gradient, model, loss, [])
    refused("requires gradients", gradient, net().requires_grad_(False), loss, batches)
    refused("a line needs a direction", along, model, loss, batches, {})
    refused(r"its shape is \(5, 4\)", along, model, loss, batches, {"0.weight": torch.ones(4)})
    refused("an estimate needs a probe", hessian_trace, model, loss, batches, samples=0)
    refused("there are 43 parameters", top_eigenpairs, model, loss, batches, 43)
    with pytest.raises(UserError, match="no such mode"):
        gradient(model, loss, batches, mode="train")  # type: ignore[arg-type]


def test_a_missing_extra_says_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    refused(r"pip install 'sparing\[curvature\]'", top_eigenpairs, net(), loss, data(), 1)
