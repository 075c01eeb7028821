"""Intervals over noise draws: Student's of a mean, and Fieller's of the asymmetry index, which is a ratio of means.

A bootstrap of n draws knows n numbers: its 95 % intervals covered the truth in half of the samples at n = 2 and in nine
of ten at n = 4. These are exact for normal draws at every n >= 2 and cover 93 to 99 % for the other distributions tried
(``docs/results/valley.md``). With few draws they are wide, up to the whole range: that is what few draws say.

Source: Student 1908; Fieller 1954, "Some problems in interval estimation" (JRSS B 16).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparing.errors import require
from sparing.valley.scans.asymmetry import mean_rises, signed_ratio

Floats = NDArray[np.float64]

LEVEL: float = 0.95  # share of intervals that should cover the truth

Falls = Literal["", "−", "+", "both"]  # sides on which a curve goes down from λ = 0

_SIDES: Final = {"−": "better on the − side", "+": "better on the + side", "both": "better on both sides"}


@dataclass(frozen=True, slots=True)
class Index:
    """An asymmetry index with its interval and noise floor."""

    value: float
    """AI of the mean curve, in [−1, 1]; > 0 where the + side is flatter; NaN below the noise floor."""
    interval: tuple[float, float]
    """95 % interval over the noise draws, (−1, 1) where they cannot tell; NaN for a single draw, below the floor, or
    where a draw is not finite."""
    n: int
    """Noise draws (count)."""
    floor: float
    """Noise floor of |N| + |P|, in the unit of the metric."""
    falls: Falls = ""
    """Sides on which the model gets better, N or P being below −floor: λ = 0 is then no minimum along this line, and
    the index, ±1 on any slope, says nothing of a valley."""

    @property
    def minimum(self) -> bool:
        """Whether the model gets no better on either side."""
        return not self.falls

    def __format__(self, spec: str) -> str:
        """Write value and interval, such as ``+0.92 [+0.88, +0.95]``; the spec of each is ``+z.2f`` by default."""
        spec = spec or "+z.2f"  # z: no minus before a zero
        if math.isnan(self.value):
            return "not above noise"
        ends = "" if math.isnan(self.interval[0]) else " [{:{s}}, {:{s}}]".format(*self.interval, s=spec)
        flag = "" if self.minimum else f" (not a minimum: {_SIDES[self.falls]})"
        return f"{self.value:{spec}}{ends}{flag}"


def asymmetry_index(lambdas: ArrayLike, values: ArrayLike, *, floor: float = 0.0, level: float = LEVEL) -> Index:
    """Return the asymmetry index of the mean over draws, values of shape (draws, L), with its interval.

    It is not the mean of the draws' indices: a draw that hardly rises has an index of any size, and would count as
    much as one that does.
    """
    minus, plus = mean_rises(lambdas, np.atleast_2d(np.asarray(values, dtype=np.float64)))
    pairs = np.stack([minus, plus], 1)
    value = float(signed_ratio(minus.mean(), plus.mean(), floor))
    ends = (math.nan, math.nan) if math.isnan(value) else ratio_interval(pairs, level=level)
    down = "".join(side for side, rise in (("−", minus), ("+", plus)) if rise.mean() < -floor)
    falls: Falls = "both" if len(down) > 1 else down  # type: ignore[assignment]
    return Index(value, ends, len(pairs), floor, falls)


def mean_interval(draws: ArrayLike, *, level: float = LEVEL) -> tuple[float, float]:
    """Return Student's interval of a mean, mean ± t s / √n; NaN for fewer than two draws or one that is not finite."""
    _require_level(level)
    rows = np.asarray(draws, dtype=np.float64)
    if len(rows) < 2 or not np.isfinite(rows).all():
        return math.nan, math.nan
    if rows.min() == rows.max():
        return float(rows[0]), float(rows[0])  # the mean of equal numbers may differ from them by rounding
    half = student_t_quantile((1 + level) / 2, len(rows) - 1) * float(rows.std(ddof=1)) / math.sqrt(len(rows))
    return float(rows.mean()) - half, float(rows.mean()) + half


def ratio_interval(pairs: ArrayLike, *, level: float = LEVEL) -> tuple[float, float]:
    """Return Fieller's interval of the index (N − P)/(|N| + |P|) of mean rises, pairs of shape (n, 2).

    The index depends on the direction φ of (N, P) only. A direction is kept while Student's test cannot tell the
    draws' component across it, N sin φ − P cos φ, from zero; all such directions form an arc, or the whole circle.
    """
    _require_level(level)
    rows = np.asarray(pairs, dtype=np.float64)
    n = len(rows)
    if n < 2 or not np.isfinite(rows).all():
        return math.nan, math.nan
    rows = rows / max(float(np.abs(rows).max()), 1e-300)  # squares neither overflow nor vanish
    mean, spread, reach = rows.mean(0), np.cov(rows.T), student_t_quantile((1 + level) / 2, n - 1) ** 2 / n
    if float(mean @ mean) ** 2 <= reach * float(mean @ spread @ mean):
        return -1.0, 1.0  # the draws cannot tell rising from falling, so neither the arc from its opposite
    a, b, c = (np.outer(mean, mean) - reach * spread)[[0, 0, 1], [0, 1, 1]].tolist()
    # Across φ the test is (a + c)/2 + (c − a)/2 · cos 2φ − b · sin 2φ <= 0: an arc of 2φ around its minimum
    size = math.hypot((c - a) / 2, b)
    level_of = -(a + c) / 2 / size if size else 1.0
    if level_of >= 1:
        return -1.0, 1.0
    half = (math.pi - math.acos(max(level_of, -1.0))) / 2
    middle = (math.atan2(-b, (c - a) / 2) + math.pi) / 2
    toward = math.atan2(mean[1], mean[0])
    middle += math.pi * round((toward - middle) / math.pi)
    # The index is monotone within each quadrant, so its extremes are at the ends and the axes in between
    turns = np.arange(math.ceil((middle - half) * 2 / math.pi), math.floor((middle + half) * 2 / math.pi) + 1)
    angles = np.array([middle - half, middle + half, *(turns * math.pi / 2)])
    found = signed_ratio(np.cos(angles), np.sin(angles))
    return float(found.min()), float(found.max())


@functools.lru_cache(maxsize=256)
def student_t_quantile(share: float, freedom: int) -> float:
    """Return the t with P(T <= t) = share, for shares in [0.5, 1), by bisection of the distribution function."""
    low, high = 0.0, 1.0
    while _student_t_cdf(high, freedom) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _student_t_cdf(t: float, freedom: int) -> float:
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


def _require_level(level: float) -> None:
    require(0 < level < 1, "level", level, "it is the share of intervals that hold the truth", "pass 0 < level < 1")
