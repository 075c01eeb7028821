"""Which rows each step sees: a pure function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparing.seeds import stream


def order(rows: int, *, seed: int, epoch: int) -> Tensor:
    """The order of one pass over the rows: a permutation, int64, (rows,)."""
    return torch.randperm(rows, generator=stream(seed, "order", epoch))


def window(step: int, *, rows: int, batch: int, accumulate: int, seed: int) -> Tensor:
    """Row indices of one optimizer step (from 0), int64, (accumulate, batch).

    The passes are concatenated and cut into windows of ``batch · accumulate``: a window may span two passes, and every
    row is seen equally often, to within one.
    """
    size = batch * accumulate
    first, last = step * size, (step + 1) * size - 1
    epochs = range(first // rows, last // rows + 1)
    passes = torch.cat([order(rows, seed=seed, epoch=epoch) for epoch in epochs])
    start = first - epochs[0] * rows
    return passes[start : start + size].view(accumulate, batch)


def steps_of(epochs: float, *, rows: int, batch: int, accumulate: int) -> int:
    """Optimizer steps of so many passes, at least 1; the last window is filled from the next pass."""
    return max(1, math.ceil(round(epochs * rows / (batch * accumulate), 9)))
