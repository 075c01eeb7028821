"""Buffers of the global model: running statistics averaged, mixed or re-estimated; counters never averaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.blocks.modes import estimating
from sparing.errors import UserError, require
from sparing.federated.methods.interface import Update, Vector
from sparing.federated.placement import device_of

_MEAN, _VAR = "running_mean", "running_var"


def average(buffers: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Average floating buffers in float64; of integers and booleans take the largest. Dtypes stay.

    Example:
        >>> a = {"mean": torch.tensor([1.0]), "count": torch.tensor(3)}
        >>> b = {"mean": torch.tensor([4.0]), "count": torch.tensor(7)}
        >>> average([a, b], [2.0, 1.0])
        {'mean': tensor([2.]), 'count': tensor(7)}
    """
    require(len(buffers) > 0, "buffers", "no clients", "there is nothing to average", "pass those of a client")
    for one in buffers:
        if odd := sorted(one.keys() ^ buffers[0].keys()):
            why = "only some clients have it"
            raise UserError("buffers", got=repr(odd[0]), why=why, do="send the same buffers from every client")
    combined = {}
    for name, first in buffers[0].items():
        stacked = torch.stack([one[name] for one in buffers])
        shares = _shares(weights, stacked)
        # Counters and flags have no mean: half a batch was never counted.
        floating = stacked.is_floating_point()
        mean = torch.tensordot(shares, stacked.double(), 1) if floating else stacked.amax(0)
        combined[name] = mean.to(first.dtype)
    return combined


def mixture(buffers: Sequence[Vector], weights: Sequence[float], variances: Collection[str]) -> Vector:
    """Average the clients' buffers, with the variance of the mixture in place of the mean of these ``variances``."""
    # Where the clients' means differ, E[var] is less than the variance of all rows together, which is
    # E[var] + Var[mean] (law of total variance); exact with the clients' rows as weights.
    result = average(buffers, weights)
    for name in filter(variances.__contains__, list(result)):
        mean_name = f"{name.removesuffix(_VAR)}{_MEAN}"
        if mean_name not in result:
            continue
        means = torch.stack([one[mean_name].double() for one in buffers])
        shares = _shares(weights, means)
        spread = torch.tensordot(shares, (means - torch.tensordot(shares, means, 1)).square(), 1)
        inside = torch.tensordot(shares, torch.stack([one[name].double() for one in buffers]), 1)
        result[name] = (inside + spread).to(result[name].dtype)
    return result


def mix(merged: Vector, updates: Sequence[Update], variances: Collection[str]) -> Vector:
    """Put the mixture's variances into buffers that a method combined; see ``mixture``."""
    mixed = mixture([update.buffers for update in updates], [update.weight for update in updates], variances)
    return {name: mixed[name] if name in variances else value for name, value in merged.items()}


def recalibrate(model: nn.Module, rows: Tensor, *, batch: int = 256) -> None:
    """Re-estimate a model's running statistics in place on the server's own rows, at least two."""
    require(len(rows) > 1, "calibration rows", len(rows), "a variance needs two rows", "pass more rows")
    # Pieces of nearly equal size, for each layer takes the plain mean of its batches' statistics.
    count, device = max(len(rows) // batch, 1), device_of(model)
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with torch.no_grad(), estimating(model, layers):
        for piece in torch.tensor_split(rows, count):
            model(piece.to(device))


def _shares(weights: Sequence[float], beside: Tensor) -> Tensor:
    shares = torch.tensor(weights, dtype=torch.float64)
    return shares.div_(shares.sum()).to(beside.device)
