"""Buffers of the global model: running statistics averaged, mixed or re-estimated; counters never averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.errors import UserError, require
from sparing.federated.methods import Update, Vector

_MEAN, _VAR = "running_mean", "running_var"


def average(buffers: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Average floating buffers in float64; of integers and booleans take the largest. Dtypes stay.

    Example:
        >>> a = {"mean": torch.tensor([1.0]), "count": torch.tensor(3)}
        >>> b = {"mean": torch.tensor([4.0]), "count": torch.tensor(7)}
        >>> average([a, b], [2.0, 1.0])
        {'mean': tensor([2.]), 'count': tensor(7)}
    """
    _require_same_names(buffers)
    shares = _shares(weights)
    return {name: _combine([one[name] for one in buffers], shares) for name in buffers[0]}


def mixture(buffers: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Average the clients' buffers, with the variance of the mixture in place of the mean variance."""
    # Where the clients' means differ, E[var] is less than the variance of all rows together, which is
    # E[var] + Var[mean] (law of total variance); exact with the clients' rows as weights.
    result = average(buffers, weights)
    shares = _shares(weights)
    for name in [name for name in result if name.endswith(_VAR)]:
        mean_name = f"{name.removesuffix(_VAR)}{_MEAN}"
        if mean_name not in result:
            continue
        means = torch.stack([one[mean_name].double() for one in buffers])
        spread = torch.tensordot(shares, (means - torch.tensordot(shares, means, 1)).square(), 1)
        inside = torch.tensordot(shares, torch.stack([one[name].double() for one in buffers]), 1)
        result[name] = (inside + spread).to(result[name].dtype)
    return result


def mix(merged: Vector, updates: Sequence[Update]) -> Vector:
    """Put the mixture's variances into buffers that a method combined; see ``mixture``."""
    mixed = mixture([update.buffers for update in updates], [update.weight for update in updates])
    return {name: mixed[name] if name.endswith(_VAR) else value for name, value in merged.items()}


def recalibrate(model: nn.Module, rows: Tensor, *, batch: int = 256) -> None:
    """Re-estimate a model's running statistics in place on the server's own rows, at least two."""
    require(len(rows) > 1, "calibration rows", len(rows), "a variance needs two rows", "pass more rows")
    # Pieces of nearly equal size, for each layer takes the plain mean of its batches' statistics.
    count = max(len(rows) // batch, 1)
    with torch.no_grad(), _estimating(model):
        for piece in torch.tensor_split(rows, count):
            model(piece)


@contextmanager
def _estimating(model: nn.Module) -> Iterator[None]:
    """Put batch norm, and nothing else, into training mode with cleared statistics and a cumulative mean."""
    modes = {module: module.training for module in model.modules()}
    layers = [module for module in modes if isinstance(module, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        # torch's cumulative mean: every batch counts the same.
        layer.momentum = None
        layer.train()
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


def _combine(values: Sequence[Tensor], shares: Tensor) -> Tensor:
    stacked = torch.stack(list(values))
    # Counters and flags have no mean: half a batch was never counted.
    if not stacked.is_floating_point():
        return stacked.amax(0)
    mean: Tensor = torch.tensordot(shares, stacked.double(), 1)
    return mean.to(stacked.dtype)


def _shares(weights: Sequence[float]) -> Tensor:
    shares = torch.tensor(weights, dtype=torch.float64)
    return shares.div_(shares.sum())


def _require_same_names(buffers: Sequence[Vector]) -> None:
    require(len(buffers) > 0, "buffers", "no clients", "there is nothing to average", "pass those of a client")
    for one in buffers:
        if odd := sorted(one.keys() ^ buffers[0].keys()):
            why = "only some clients have it"
            raise UserError("buffers", got=repr(odd[0]), why=why, do="send the same buffers from every client")
