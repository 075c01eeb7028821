"""Two models on the same rows: tests and intervals that use which rows each got right, not only how many.

Two accuracies on one test set are not independent: most rows are right or wrong under both models, and only the rows
on which they differ say which is better. Separate intervals of the two shares ignore that and hide differences.

    mcnemar(first_right, second_right).p            # rows right or wrong
    paired_bootstrap(first_loss, second_loss, seed=0).interval   # any number a row

Of rows that are 0 or 1 a resampling knows only the few on which the models differ, and says "no difference" with
certainty where by chance none did: their interval is Tango's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sparing.errors import require
from sparing.seeds import stream

LEVEL = 0.95  # share of intervals that should hold the truth

RESAMPLES = 4000  # bootstrap resamples (count): the end of an interval at the 2.5 % level then stands on 100 of them

FEWEST = 10  # pairs below which an interval is refused, and pairs that differ below which the bootstrap's is (count)

MANY = 10_000  # pairs above which the mean is normal enough for Student's interval, which needs no resampling (count)

_CELLS = 1 << 22  # row numbers drawn at a time: 32 MiB


@dataclass(frozen=True, slots=True)
class McNemar:
    """Rows on which two models differ."""

    first_only: int  # rows that only the first has right (count)
    second_only: int  # rows that only the second has right (count)
    rows: int  # all rows (count)

    @property
    def difference(self) -> float:
        """Accuracy of the first less that of the second, in [−1, 1]."""
        return (self.first_only - self.second_only) / self.rows

    @property
    def z(self) -> float:
        """(b − c)/√(b + c): standard errors between the two if they were equally good; 0 where no row differs."""
        differ = self.first_only + self.second_only
        return (self.first_only - self.second_only) / math.sqrt(differ) if differ else 0.0

    @property
    def p(self) -> float:
        """Exact two-sided p-value: how often equally good models differ at least so much on so many differing rows."""
        return min(1.0, 2 * _lower_tail(min(self.first_only, self.second_only), self.first_only + self.second_only))


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Compare which rows two models have right.

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages";
    exact by the binomial law of the differing rows.

    Example:
        >>> found = mcnemar([1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0])
        >>> found.first_only, found.second_only, found.p
        (4, 0, 0.125)
    """
    one, other = _rows(first), _rows(second)
    _require_pairs(one, other, 1, "a test needs a row")
    binary = _right_or_wrong(one, other)
    do = "pass whether each row is right, or use paired_bootstrap"
    require(binary, "rows", "other numbers than 0 and 1", "a row is right or wrong", do)
    return McNemar(int((one > other).sum()), int((other > one).sum()), len(one))


@dataclass(frozen=True, slots=True)
class PairedMean:
    """Mean of differences on the same rows."""

    mean: float  # mean of first − second, in their unit
    interval: tuple[float, float]  # interval of the mean, at the level asked for
    rows: int  # pairs (count)


def paired_bootstrap(
    first: ArrayLike, second: ArrayLike, *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> PairedMean:
    """Bound the mean difference of two models on the same rows.

    Rows that are all 0 or 1 have Tango's score interval, which holds the truth however few of them differ. Of other
    numbers, rows are drawn again, each with both its numbers; the percentiles are moved outwards by √(n/(n−1)) and from
    the normal to Student's law, so that the interval of few rows is no narrower than it should be. Above 10,000 rows
    the interval is Student's own, which agrees there. Rows must be independent; of a text, take one number a document.

    Source: Efron & Tibshirani 1993, chapter 13; Hesterberg 2015, section 5.3, for the moved percentiles; Tango 1998,
    "Equivalence test and confidence interval for the difference in proportions for the paired-sample design".

    Example:
        >>> found = paired_bootstrap([1.0] * 10, [0.5] * 10)
        >>> found.mean, found.interval
        (0.5, (0.5, 0.5))
    """
    one, other = _rows(first), _rows(second)
    _require_pairs(one, other, FEWEST, "the interval of fewer holds the truth too seldom")
    require(0 < level < 1, "level", level, "it is a share of intervals", "pass one between 0 and 1")
    gaps = one - other
    finite = bool(gaps.isfinite().all())
    require(finite, "rows", "numbers that are not finite", "their mean says nothing", "find out where they come from")
    n, mean = len(gaps), float(gaps.mean())
    if _right_or_wrong(one, other):
        return PairedMean(mean, _score(int((gaps > 0).sum()), int((gaps < 0).sum()), n, level), n)
    differ, why = int((gaps != 0).sum()), "the interval of fewer that differ holds the truth too seldom"
    require(differ >= FEWEST, "rows", f"{differ} of {n} that differ", why, "measure more rows")
    tail = (1 - level) / 2
    if n > MANY:
        half = -_student(tail, n) * float(gaps.std()) / math.sqrt(n)
        return PairedMean(mean, (mean - half, mean + half), n)
    return PairedMean(mean, _resampled(gaps, tail, resamples, stream(seed, "report", "pairs", n, resamples)), n)


def can_bound(first: ArrayLike, second: ArrayLike) -> bool:
    """Whether ``paired_bootstrap`` has an interval for these rows: enough of them, finite, and enough that differ."""
    one, other = _rows(first), _rows(second)
    gaps = one - other
    if len(gaps) < FEWEST or not bool(gaps.isfinite().all()):
        return False
    return _right_or_wrong(one, other) or int((gaps != 0).sum()) >= FEWEST


def _right_or_wrong(one: Tensor, other: Tensor) -> bool:
    """Whether all rows are 0 or 1."""
    return all(bool(((rows == 0) | (rows == 1)).all()) for rows in (one, other))


def _resampled(gaps: Tensor, tail: float, resamples: int, source: torch.Generator) -> tuple[float, float]:
    """Percentiles of the means of rows drawn again."""
    n = len(gaps)
    at_once = max(1, _CELLS // n)
    sizes = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    means = torch.cat([gaps[torch.randint(n, (size, n), generator=source)].mean(1) for size in sizes])
    moved = _widened(tail, n)
    low, high = torch.quantile(means, torch.tensor([moved, 1 - moved], dtype=torch.float64)).tolist()
    return low, high


def _score(b: int, c: int, n: int, level: float) -> tuple[float, float]:
    """Find Tango's interval: all differences δ that b and c differing rows of n do not reject.

    Under δ the likeliest share q of rows that only the second has is the larger root of
    2n q² + ((2n − b + c) δ − b − c) q − c δ (1 − δ) = 0, and the score is (b − c − n δ)/√(n (2q + δ (1 − δ))).
    """
    bar, seen = NormalDist().inv_cdf((1 + level) / 2), (b - c) / n

    def score(gap: float) -> float:
        linear = (2 * n - b + c) * gap - b - c
        share = (math.sqrt(max(0.0, linear**2 + 8 * n * c * gap * (1 - gap))) - linear) / (4 * n)
        apart, spread = b - c - n * gap, n * (2 * share + gap * (1 - gap))
        return apart / math.sqrt(spread) if spread > 0 else math.copysign(math.inf, apart) if apart else 0.0

    ends = []
    for edge in (-1.0, 1.0):
        inside, outside = seen, edge
        # halved to the last bit: the score falls as δ grows
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) <= bar else (inside, middle)
        ends.append(outside if abs(score(outside)) <= bar else inside)
    return ends[0], ends[1]


def _rows(values: ArrayLike) -> Tensor:
    return torch.as_tensor(values).to(torch.float64)


def _require_pairs(one: Tensor, other: Tensor, fewest: int, why: str) -> None:
    shapes = f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    same = one.ndim == 1 and one.shape == other.shape
    require(same, "rows", shapes, "row i of both is the same row", "pass two of shape (rows,), in the same order")
    require(len(one) >= fewest, "rows", len(one), why, f"pass {fewest} or more")


def _lower_tail(least: int, tosses: int) -> float:
    """P(X <= least), X binomial of fair tosses; from the largest term downwards, so that no power of 2 overflows."""
    whole = math.lgamma(tosses + 1) - math.lgamma(least + 1) - math.lgamma(tosses - least + 1)
    term = total = math.exp(whole - tosses * math.log(2))
    for k in range(least, 0, -1):
        term *= k / (tosses - k + 1)
        total += term
    return total


def _widened(tail: float, n: int) -> float:
    """Φ(√(n/(n−1)) t) of Student's quantile t: a percentile interval of few rows would be too narrow."""
    return NormalDist().cdf(math.sqrt(n / (n - 1)) * _student(tail, n))


def _student(tail: float, n: int) -> float:
    """Student's quantile of n numbers, as in Abramowitz & Stegun 26.7.5 (to 0.001 from n = 10)."""
    z, freedom = NormalDist().inv_cdf(tail), n - 1
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
