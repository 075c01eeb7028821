"""Slope and curvature of a loss: gradient, second derivative along a line, trace and top eigenvalues of the Hessian.

All four take a model, a loss of one batch, and batches, and differentiate the mean of that loss over batches (weigh
batches of unequal size in the loss, or keep them equal). Batch norm uses its stored statistics as constants, or with
``mode="batch"`` those of the batch, as functions of it; dropout is off in both, and modes and buffers are restored.
Parameters without gradients are constants.

    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    slope, bend = along(model, loss, batches, direction_of(Noise("gaussian"), model, seed=0).vector)
    hessian_trace(model, loss, batches, samples=64, seed=0)

Products with the Hessian are double backward passes. A single batch is run forward once for all of them; several take
less memory and are run forward for each. torch.func is no alternative: in torch 2.13 its second derivative treats the
statistics of layer norm, and of batch norm in training mode, as constants, and group norm has none. The Lanczos
iteration is SciPy's (extra ``curvature``).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparing.blocks import named_parameters
from sparing.errors import RunError, UserError, require
from sparing.seeds import stream
from sparing.valley.apply import preserve_buffers
from sparing.valley.scans.intervals import student_t_quantile
from sparing.vectors import Vector, flatten, like

Loss = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> mean loss of the batch, shape ()

Mode = Literal["eval", "batch"]  # statistics of batch norm: those that were stored, or those of the batch itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A randomised estimate with its error."""

    value: float  # mean over the probes
    error: float  # standard error of the mean, deviation / √samples; NaN with a single probe
    interval: tuple[float, float]  # 95 % confidence interval of the mean by Student's t; NaN with a single probe
    samples: int  # probes (count)


def gradient(model: nn.Module, loss: Loss, batches: Iterable[Any], *, mode: Mode = "eval") -> dict[str, Tensor]:
    """Return the gradient of the mean loss over batches; ``grad`` is not touched.

    Args:
        model: Any module.
        loss: Mean loss of one batch.
        batches: At least one.
        mode: Statistics of batch norm.

    Returns:
        Parameter name -> tensor, for the parameters that require gradients; zero where the loss does not depend on one.

    Raises:
        UserError: If there are no batches, nothing requires gradients, or the loss is not one finite number.
    """
    return loss_and_gradient(model, loss, batches, mode=mode)[1]


def loss_and_gradient(
    model: nn.Module, loss: Loss, batches: Iterable[Any], *, mode: Mode = "eval"
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over batches, summed in float64, and its gradient: ``gradient``."""
    params, data = _params_and_batches(model, batches)
    total, mean = {name: torch.zeros_like(value) for name, value in params.items()}, 0.0
    with _differentiable(model, mode):
        for batch in data:
            value = _loss_value(model, loss, batch)
            mean += value.item() / len(data)
            for name, part in _grads(value, params).items():
                total[name] += part / len(data)
    return mean, total


def along(
    model: nn.Module, loss: Loss, batches: Iterable[Any], vector: Vector, *, mode: Mode = "eval"
) -> tuple[float, float]:
    """Return the first and second derivative of the mean loss along a line, at the model itself.

    They are g·d and dᵀHd with λ ↦ loss(θ + λd): one double backward pass a batch.

    Args:
        model: Any module.
        loss: Mean loss of one batch; it must be twice differentiable.
        batches: At least one.
        vector: d, parameter name -> tensor; parameters that it does not name do not move.
        mode: Statistics of batch norm.

    Returns:
        (slope, curvature), per unit and squared unit of λ, sums in float64.

    Raises:
        UserError: As ``gradient``; if the vector names a parameter that the model does not have, or a frozen one.
    """
    params, data = _params_and_batches(model, batches)
    require(bool(vector), "vector", "no tensors", "a line needs a direction", "name one parameter at least")
    for name, value in vector.items():
        got, why = f"shape {tuple(value.shape)} for {name!r}", "no parameter of that name has gradients"
        if name in params:
            why = f"its shape is {tuple(params[name].shape)}"
        fits = name in params and params[name].shape == value.shape
        require(fits, "vector", got, why, "pass a direction of this model")
    moving = {name: params[name] for name in params if name in vector}
    slope = bend = 0.0
    with _differentiable(model, mode):
        for batch in data:
            first = _grads(_loss_value(model, loss, batch), moving, create_graph=True)
            one = _dot(first, vector)
            slope += one.item() / len(data)
            if one.requires_grad:  # a loss that is linear in the parameters has no second derivative
                bend += _dot(_grads(one, moving), vector).item() / len(data)
    return slope, bend


def hessian_trace(
    model: nn.Module, loss: Loss, batches: Iterable[Any], *, samples: int = 32, seed: int = 0, mode: Mode = "eval"
) -> Estimate:
    """Estimate the trace of the Hessian of the mean loss by random signs.

    For v of independent ±1, E[vᵀHv] = tr H, with variance 2 Σ_{i≠j} H_ij²: exact for a diagonal Hessian.

    Args:
        model: Any module.
        loss: Mean loss of one batch.
        batches: At least one.
        samples: Probes (count); each is one Hessian product, up to three times the cost of a gradient.
        seed: Seed of the probes.
        mode: Statistics of batch norm.

    Returns:
        The estimate with its standard error and 95 % interval.

    Raises:
        UserError: As ``gradient``; if ``samples`` is below 1.

    Source: Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix".
    """
    require(samples >= 1, "samples", samples, "an estimate needs a probe", "pass samples >= 1")
    found = []
    with _hessian_products(model, loss, batches, mode) as (product, params):
        flat = flatten(params)
        for probe in range(samples):
            signs = torch.randint(0, 2, flat.shape, generator=stream(seed, "valley", "trace", probe)) * 2 - 1
            v = signs.to(flat)
            found.append(torch.dot(v.double(), product(v).double()).item())
    return estimate(found)


def top_eigenpairs(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    k: int = 1,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
    mode: Mode = "eval",
) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the largest eigenvalues of the Hessian of the mean loss, with unit eigenvectors.

    The sign of an eigenvector is arbitrary; here its largest element is positive.

    Args:
        model: Any module.
        loss: Mean loss of one batch.
        batches: At least one.
        k: How many, fewer than there are parameters.
        seed: Seed of the first vector of the Lanczos iteration; results are equal for equal seeds.
        tolerance: Relative accuracy of the eigenvalues.
        mode: Statistics of batch norm.

    Returns:
        (eigenvalue, parameter name -> tensor), largest first.

    Raises:
        UserError: As ``gradient``; if ``k`` is out of range, or SciPy is not installed.
        RunError: If the iteration does not converge.
    """
    with _hessian_products(model, loss, batches, mode) as (product, params):
        flat = flatten(params)
        size = flat.numel()
        require(1 <= k < size, "k", k, f"there are {size} parameters", "pass 1 <= k < that number")
        try:
            linalg: Any = importlib.import_module("scipy.sparse.linalg")
        except ImportError as error:
            why, do = "eigenvalues are computed with it", "pip install 'sparing[curvature]'"
            raise UserError("curvature", got="no SciPy", why=why, do=do) from error

        def matvec(v: Any) -> Any:
            return product(torch.from_numpy(v.ravel().copy()).to(flat)).double().cpu().numpy()

        operator = linalg.LinearOperator((size, size), matvec=matvec, dtype=np.float64)
        start = torch.randn(size, generator=stream(seed, "valley", "lanczos"), dtype=torch.float64)
        try:
            values, vectors = linalg.eigsh(operator, k=k, which="LA", v0=start.numpy(), tol=tolerance)
        except linalg.ArpackNoConvergence as error:
            raise RunError(f"top_eigenpairs: the Lanczos iteration found {len(error.eigenvalues)} of {k}") from error
    # ARPACK gives them in rising order, and eigenvectors up to their sign
    order = np.argsort(values)[::-1]
    columns = [torch.from_numpy(np.ascontiguousarray(vectors[:, at])) for at in order]
    turned = [column * torch.sign(column[column.abs().argmax()]) for column in columns]
    pairs = zip(order, turned, strict=True)
    return [(float(values[at]), like((column / column.norm()).to(flat), params)) for at, column in pairs]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its standard error and 95 % interval by Student's t.

    Example:
        >>> estimate([1.0, 3.0]).value
        2.0
    """
    count, mean = len(values), float(np.mean(values))
    if count == 1:
        return Estimate(value=mean, error=math.nan, interval=(math.nan, math.nan), samples=1)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    reach = student_t_quantile(0.975, count - 1) * error
    return Estimate(value=mean, error=error, interval=(mean - reach, mean + reach), samples=count)


@contextmanager
def _hessian_products(
    model: nn.Module, loss: Loss, batches: Iterable[Any], mode: Mode
) -> Iterator[tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]]:
    """Yield the function v ↦ Hv on flat tensors, and the parameters it covers."""
    params, data = _params_and_batches(model, batches)

    def slope(batch: Any) -> dict[str, Tensor]:
        found = _grads(_loss_value(model, loss, batch), params, create_graph=True)
        # A slope that does not depend on the parameters, as of a linear loss, has no derivative
        return {name: part for name, part in found.items() if part.requires_grad}

    def product(v: Tensor) -> Tensor:
        vector, total = like(v, params), torch.zeros_like(v)
        for batch in data:
            if slopes := slope(batch) if kept is None else kept:
                cotangents = [vector[name] for name in slopes]
                found = torch.autograd.grad(
                    list(slopes.values()), list(params.values()), cotangents, retain_graph=kept is not None,
                    allow_unused=True, materialize_grads=True,
                )  # fmt: skip
                total += flatten(dict(zip(params, found, strict=True))) / len(data)
        return total

    with _differentiable(model, mode):
        # A product holds the graph of a batch anyway. Kept, that of a single one saves 18 to 36 % of the time of each
        # further product, for a peak 20 to 25 % higher (VGG, 1,000 rows); several would cost memory by their number
        kept = slope(data[0]) if len(data) == 1 else None
        for batch in data if kept is None else ():
            _loss_value(model, loss, batch)  # so that a bad loss is refused before the first product
        yield product, {name: value.detach() for name, value in params.items()}


@contextmanager
def _differentiable(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Run in the given mode, without dropout."""
    require(mode in {"eval", "batch"}, "mode", repr(mode), "there is no such mode", 'pass "eval" or "batch"')
    # Of torch's attention kernels, only the plain one can be differentiated twice
    with preserve_buffers(model), sdpa_kernel(SDPBackend.MATH):
        model.eval()
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        tracking = [module.track_running_stats for module in norms]
        try:
            if mode == "batch":
                for module in norms:
                    module.train()
                    # Else every forward pass would write to the buffers, also the one of the derivative
                    module.track_running_stats = False
            yield
        finally:
            for module, flag in zip(norms, tracking, strict=True):
                module.track_running_stats = flag


def _params_and_batches(model: nn.Module, batches: Iterable[Any]) -> tuple[dict[str, Tensor], list[Any]]:
    params: dict[str, Tensor] = {name: value for name, value in named_parameters(model).items() if value.requires_grad}
    do = "unfreeze some of its parameters"
    require(bool(params), "model", "no parameter that requires gradients", "its loss has no slope", do)
    data = list(batches)
    require(bool(data), "batches", "none", "a mean needs one", "pass at least one batch")
    return params, data


def _dot(one: Vector, other: Vector) -> Tensor:
    """Return the inner product over the names of the first, summed in float64."""
    parts = [(value.double() * other[name].to(value.device).double()).sum() for name, value in one.items()]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _loss_value(model: nn.Module, loss: Loss, batch: Any) -> Tensor:
    """Evaluate the loss of one batch; refuse all but one finite number with a gradient."""
    # The caller may be inside torch.no_grad(), as an evaluation is
    with torch.enable_grad():
        value = loss(model, batch)
    fine = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    require(fine, "loss", got, "it must be one number that depends on the parameters", "return a mean, not detached")
    require(bool(torch.isfinite(value)), "loss", value.item(), "it has no slope", "check the model and the batch")
    return value


def _grads(value: Tensor, params: dict[str, Tensor], *, create_graph: bool = False) -> dict[str, Tensor]:
    """Differentiate a number; ``create_graph`` prepares a second derivative."""
    found = torch.autograd.grad(
        value.sum(), list(params.values()), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(params, found, strict=True))
