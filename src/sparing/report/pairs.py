"""Two models on the same rows: tests and intervals that use which rows each got right, not only how many.

Two accuracies on one test set are not independent: most rows are right or wrong under both models, and only the rows
on which they differ say which is better. Separate intervals of the two shares ignore that and hide differences.

    mcnemar(first_right, second_right).p            # rows right or wrong
    paired_bootstrap(first_loss, second_loss, seed=0).interval   # any number a row
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

LEVEL = 0.95
"""Share of intervals that should hold the truth."""

RESAMPLES = 4000
"""Bootstrap resamples (count): the end of an interval at the 2.5 % level then stands on 100 of them."""

FEWEST = 10
"""Pairs below which the bootstrap's interval is refused (count): of fewer it holds the truth too seldom."""

_CELLS = 1 << 22  # row numbers drawn at a time: 32 MiB


@dataclass(frozen=True, slots=True)
class McNemar:
    """Rows on which two models differ."""

    first_only: int
    """Rows that only the first has right (count)."""

    second_only: int
    """Rows that only the second has right (count)."""

    rows: int
    """All rows (count)."""

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

    Args:
        first: Whether the first model has each row right, shape (rows,), bool or 0 and 1.
        second: The same of the second, on the same rows in the same order.

    Returns:
        Counts, difference, z and exact p-value.

    Raises:
        UserError: If the shapes differ, there are no rows, or something is neither right nor wrong.

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages";
    exact by the binomial law of the differing rows.

    Example:
        >>> found = mcnemar([1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0])
        >>> found.first_only, found.second_only, found.p
        (4, 0, 0.125)
    """
    one, other = _rows(first), _rows(second)
    _require_pairs(one, other, 1, "a test needs a row")
    binary = bool(((one == 0) | (one == 1)).all() and ((other == 0) | (other == 1)).all())
    do = "pass whether each row is right, or use paired_bootstrap"
    require(binary, "rows", "other numbers than 0 and 1", "a row is right or wrong", do)
    return McNemar(int((one > other).sum()), int((other > one).sum()), len(one))


@dataclass(frozen=True, slots=True)
class PairedMean:
    """Mean of differences on the same rows."""

    mean: float
    """Mean of first − second, in their unit."""

    interval: tuple[float, float]
    """Bootstrap interval of the mean, at the level asked for."""

    rows: int
    """Pairs (count)."""


def paired_bootstrap(
    first: ArrayLike, second: ArrayLike, *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> PairedMean:
    """Bound the mean difference of two models on the same rows: rows are drawn again, each with both its numbers.

    The percentiles are moved outwards by √(n/(n−1)) and from the normal to Student's law, so that the interval of
    few rows is no narrower than it should be. Rows must be independent; of a text, take one number a document.

    Args:
        first: A number of the first model for each row, such as its loss, shape (rows,).
        second: The same of the second, on the same rows in the same order.
        seed: Of the resampling.
        level: Share of intervals that should hold the truth, in (0, 1).
        resamples: How many (count).

    Returns:
        Mean difference and its interval.

    Raises:
        UserError: If the shapes differ, a number is not finite, or there are fewer than 10 rows.

    Source: Efron & Tibshirani 1993, chapter 13; Hesterberg 2015, section 5.3, for the moved percentiles.

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
    n, source = len(gaps), stream(seed, "report", "pairs", len(gaps), resamples)
    sizes = [min(max(1, _CELLS // n), resamples - start) for start in range(0, resamples, max(1, _CELLS // n))]
    means = torch.cat([gaps[torch.randint(n, (size, n), generator=source)].mean(1) for size in sizes])
    tail = _outward((1 - level) / 2, n)
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return PairedMean(float(gaps.mean()), (low, high), n)


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


def _outward(tail: float, n: int) -> float:
    """Φ(√(n/(n−1)) t) of Student's quantile t, as in Abramowitz & Stegun 26.7.5 (to 0.001 from n = 10)."""
    z, freedom = NormalDist().inv_cdf(tail), n - 1
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return NormalDist().cdf(math.sqrt(n / freedom) * (z + first / freedom + second / freedom**2))
