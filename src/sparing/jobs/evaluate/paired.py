"""Losses of records and answers to items as means with intervals, of one model and of two on the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.report.pairs import can_bound, mcnemar, paired_bootstrap


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean, its 95 % interval where there are rows enough for one, and how many rows it is over."""

    value: float
    low: float | None
    high: float | None
    n: int

    def row(self, name: str) -> dict[str, Any]:
        """As columns of a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high, "n": self.n}


def linearized(sums: Sequence[float], weights: Sequence[float]) -> Tensor:
    """Numbers whose plain mean is Σ sums / Σ weights and whose spread is that of this ratio, float64, shape (n,).

    (s − R w)/w̄ + R: records of a text differ in length, and the loss of a token is a ratio of two sums.

    Source: Cochran 1977, Sampling Techniques, section 6.3.

    Example:
        >>> linearized([2.0, 9.0], [1.0, 3.0]).tolist()
        [2.375, 3.125]
    """
    s, w = (torch.tensor(given, dtype=torch.float64) for given in (sums, weights))
    ratio = s.sum() / w.sum()
    return (s - ratio * w) / w.mean() + ratio


def ratio(sums: Sequence[float], weights: Sequence[float]) -> Mean:
    """Σ sums / Σ weights over independent records: a loss per token."""
    return mean(linearized(sums, weights).tolist(), value=math.fsum(sums) / math.fsum(weights))


def ratio_gap(first: Sequence[float], second: Sequence[float], weights: Sequence[float]) -> Mean:
    """``ratio`` of the first less that of the second, which read the same records."""
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    return ratio(gaps, weights)


def mean(rows: Sequence[float], *, value: float | None = None) -> Mean:
    """Mean of independent rows; of rows that are 0 or 1 with the score interval."""
    return gap(rows, [0.0] * len(rows), value=value)


def gap(first: Sequence[float], second: Sequence[float], *, value: float | None = None) -> Mean:
    """Mean of first − second over rows that are the same for both."""
    if value is None:
        value = math.fsum(a - b for a, b in zip(first, second, strict=True)) / len(first)
    low, high = paired_bootstrap(first, second).interval if can_bound(first, second) else (None, None)
    return Mean(value, low, high, len(first))


def differing(first: Sequence[float], second: Sequence[float]) -> float | None:
    """How often equally good models differ by chance at least so much (exact McNemar); None unless right or wrong."""
    return mcnemar(first, second).p if {*first, *second} <= {0.0, 1.0} else None
