"""Intervals by the bootstrap over noise draws: the draws are drawn again, with replacement, and the number redone.

The percentile interval of few draws is too narrow: resampled means spread √((n−1)/n) of what they should, and the
tails are a normal law's instead of Student's. Its two levels are therefore moved outwards until they would be right for
normal draws; with 5 draws an interval of 95 % then reaches nearly from the lowest to the highest draw, and holds the
truth of normal draws in 92 % of cases instead of 84 %; with 10 draws in 95 % instead of 90 %.

Source: Efron & Tibshirani 1993, chapter 13 (percentile interval); Hesterberg 2015, section 5.3 (the moved levels,
"expanded percentile").
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sparing.errors import require
from sparing.seeds import stream
from sparing.valley.asymmetry import ratio, rises

Floats = NDArray[np.float64]

LEVEL: float = 0.95
"""Share of intervals that should hold the truth."""
RESAMPLES: int = 4000
"""Bootstrap resamples (count): the end of an interval at the 2.5 % level then stands on 100 of them."""


@dataclass(frozen=True, slots=True)
class Index:
    """An asymmetry index with what is needed to believe it."""

    value: float
    """AI of the mean curve, in [−1, 1]; > 0 where the + side is flatter; NaN below the noise floor."""
    interval: tuple[float, float]
    """95 % bootstrap interval over the noise draws; NaN for a single draw or below the floor."""
    n: int
    """Noise draws (count)."""
    floor: float
    """Noise floor of |N| + |P|, in the unit of the metric."""

    def __format__(self, spec: str) -> str:
        """Write value and interval, such as ``+0.92 [+0.88, +0.95]``; the spec of each is ``+z.2f`` by default."""
        spec = spec or "+z.2f"  # z: no minus before a zero
        if math.isnan(self.value):
            return "not above noise"
        if math.isnan(self.interval[0]):
            return f"{self.value:{spec}}"
        return f"{self.value:{spec}} [{self.interval[0]:{spec}}, {self.interval[1]:{spec}}]"


def asymmetry(
    lambdas: ArrayLike, values: ArrayLike, *, floor: float = 0.0, seed: int = 0, level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Index:  # fmt: skip
    """Return the asymmetry index of the mean over draws, with its bootstrap interval.

    The index is that of the mean curve, not the mean of the draws' indices: a draw that hardly rises has an index of
    any size, and would count as much as one that does.

    Args:
        lambdas: Positions, shape (L,).
        values: f there, one row per noise draw, shape (draws, L).
        floor: Noise floor, in the unit of f, for the mean curve and for every resample.
        seed: Of the resampling.
        level: Share of intervals that should hold the truth, in (0, 1).
        resamples: Bootstrap resamples (count).

    Returns:
        Value, interval, number of draws and floor. Resamples below the floor are left out; where they are more than
        half, the interval is NaN.

    Raises:
        UserError: As ``sparing.valley.asymmetry.index``.
    """
    minus, plus = rises(lambdas, np.atleast_2d(np.asarray(values, dtype=np.float64)))
    both = np.stack([minus, plus], 1)
    value = float(ratio(minus.mean(), plus.mean(), floor))
    if math.isnan(value):
        return Index(value, (math.nan, math.nan), len(both), floor)
    again = interval(
        both, lambda mean: ratio(mean[:, 0], mean[:, 1], floor), seed=seed, level=level, resamples=resamples
    )
    return Index(value, again, len(both), floor)


def interval(
    draws: ArrayLike, statistic: Callable[[Floats], Floats] | None = None, *, seed: int = 0, level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:  # fmt: skip
    """Return the bootstrap interval of a function of the mean over draws.

    Args:
        draws: One row per draw, shape (n, ...).
        statistic: Resampled means, shape (resamples, ...) -> numbers, shape (resamples,); the mean itself by default,
            for draws of shape (n,).
        seed: Of the resampling.
        level: Share of intervals that should hold the truth, in (0, 1).
        resamples: Bootstrap resamples (count).

    Returns:
        Lower and upper end; NaN for fewer than two draws, or where more than half of the resamples have no number.

    Raises:
        UserError: If ``level`` is outside (0, 1).
    """
    require(0 < level < 1, "level", level, "it is the share of intervals that hold the truth", "pass 0 < level < 1")
    rows = np.asarray(draws, dtype=np.float64)
    if len(rows) < 2:
        return math.nan, math.nan
    means = resampled_means(rows, seed=seed, resamples=resamples)
    found = means if statistic is None else statistic(means)
    found = found[~np.isnan(found)]
    if 2 * len(found) <= resamples:
        return math.nan, math.nan
    tail = outward((1 - level) / 2, len(rows))
    low, high = np.quantile(found, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def resampled_means(rows: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Return means over draws that were drawn again with replacement.

    Args:
        rows: One row per draw, shape (n, ...).
        seed: Of the resampling; the same seed and n draw the same rows, so that metrics are resampled together.
        resamples: How many (count).

    Returns:
        Shape (resamples, ...).
    """
    weights = _weights(len(rows), seed, resamples)
    if np.isfinite(rows).all():
        return np.asarray(np.tensordot(weights, rows, axes=1))
    # 0 · ∞ is NaN: a draw that was not drawn must not count.
    flat = rows.reshape(len(rows), -1)
    with np.errstate(invalid="ignore"):
        terms = np.where(weights[:, :, None] > 0, weights[:, :, None] * flat, 0.0)
    return np.asarray(terms.sum(1).reshape(resamples, *rows.shape[1:]))


@functools.lru_cache(maxsize=8)
def _weights(n: int, seed: int, resamples: int) -> Floats:
    """Share of each draw in each resample, shape (resamples, n)."""
    drawn = torch.randint(n, (resamples, n), generator=stream(seed, "valley", "bootstrap", n, resamples)).numpy()
    counts = np.zeros((resamples, n))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1.0)
    counts /= n
    counts.flags.writeable = False
    return counts


def outward(tail: float, n: int) -> float:
    """Return the level at which to read a percentile of n resampled draws instead of ``tail``.

    Args:
        tail: Share beyond one end of the interval, in (0, 0.5).
        n: Draws (count), >= 2.

    Returns:
        Φ(√(n/(n−1)) · t), t the ``tail`` quantile of Student's law with n − 1 degrees of freedom; below ``tail``.

    Source: Hesterberg 2015, section 5.3.
    """
    return NormalDist().cdf(math.sqrt(n / (n - 1)) * -_student(1 - tail, n - 1))


def _student(share: float, freedom: int) -> float:
    """Quantile of Student's law above its median, by bisection of the distribution function."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """P(T <= t), t >= 0, by the finite series for whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if freedom % 2 == 0:
        term = total = 1.0
        for k in range(1, freedom // 2):
            term *= (2 * k - 1) / (2 * k) * square
            total += term
        return 0.5 + 0.5 * sine * total
    total = 0.0
    term = math.cos(angle)
    for k in range(1, (freedom + 1) // 2):
        total += term
        term *= 2 * k / (2 * k + 1) * square
    return 0.5 + (angle + sine * total) / math.pi
