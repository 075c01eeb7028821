"""Which rows each step sees: a pure function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparing.seeds import stream


def order(rows: int, *, seed: int, epoch: int) -> Tensor:
    """The order of one pass over the rows.

    Args:
        rows: Number of rows.
        seed: Which orders.
        epoch: Which pass (from 0).

    Returns:
        A permutation of ``range(rows)``, int64, shape (rows,).
    """
    return torch.randperm(rows, generator=stream(seed, "order", epoch))


def window(step: int, *, rows: int, batch: int, accumulate: int, seed: int) -> Tensor:
    """The rows of one optimizer step.

    The passes are laid end to end and cut into windows of ``batch · accumulate``, so a window may span two passes and
    every row is seen equally often, to within one.

    Args:
        step: Optimizer step, from 0.
        rows: Number of rows.
        batch: Rows per micro-batch.
        accumulate: Micro-batches per step.
        seed: Which orders.

    Returns:
        Row indices, int64, shape (accumulate, batch).
    """
    size = batch * accumulate
    first, last = step * size, (step + 1) * size - 1
    epochs = range(first // rows, last // rows + 1)
    passes = torch.cat([order(rows, seed=seed, epoch=epoch) for epoch in epochs])
    start = first - epochs[0] * rows
    return passes[start : start + size].view(accumulate, batch)


def steps_of(epochs: float, *, rows: int, batch: int, accumulate: int) -> int:
    """The optimizer steps that some passes take.

    Args:
        epochs: Passes, may be a fraction.
        rows: Number of rows.
        batch: Rows per micro-batch.
        accumulate: Micro-batches per step.

    Returns:
        At least 1; the last window is filled from the next pass.
    """
    return max(1, math.ceil(round(epochs * rows / (batch * accumulate), 9)))
