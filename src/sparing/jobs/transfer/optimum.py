"""Where a sweep is best and what using another's best rate costs: plain arithmetic on losses over log2 rates.

A curve maps log2 of a rate to a loss; a run that diverged has an infinite loss. Nothing here reads a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from sparing.seeds import stream

Curve = Mapping[float, float]  # log2 rate -> loss (nat)

Kind = Literal["inside", "edge of divergence", "lowest tried", "highest tried", "none"]
"""How the optimum is known: between three rates; beside a diverged one, so that the grid point stands; censored at an
end of the grid, the true one lies beyond; or not at all."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best rate of a sweep."""

    x: float  # log2 of the best rate: the parabola's vertex if "inside", else the best one tried; NaN if none
    grid: float  # log2 of the best rate tried; NaN if none
    loss: float  # at the best rate tried; infinite if none
    kind: Kind

    @property
    def censored(self) -> bool:
        """Whether the true optimum may lie beyond what was tried."""
        return self.kind in {"lowest tried", "highest tried", "none"}


def optimum(curve: Curve) -> Optimum:
    """Find the best rate: the vertex of the parabola through the best point and its two neighbors.

    Example:
        >>> optimum({-3: 2.0, -2: 1.0, -1: 1.0, 0: 2.0}).x
        -1.5
        >>> optimum({-3: 1.0, -2: 2.0}).kind
        'lowest tried'
    """
    xs = sorted(curve)
    finite = [x for x in xs if math.isfinite(curve[x])]
    if not finite:
        return Optimum(math.nan, math.nan, math.inf, "none")
    # of equal losses the lower rate, whatever the order of the curve
    best = min(finite, key=lambda x: (curve[x], x))
    at = xs.index(best)
    if at == 0:
        return Optimum(best, best, curve[best], "lowest tried")
    if at == len(xs) - 1:
        return Optimum(best, best, curve[best], "highest tried")
    around = [(x, curve[x]) for x in xs[at - 1 : at + 2]]
    if not all(math.isfinite(y) for _, y in around):
        return Optimum(best, best, curve[best], "edge of divergence")
    return Optimum(vertex(around), best, curve[best], "inside")


def vertex(points: Sequence[tuple[float, float]]) -> float:
    """Where the parabola through three points by rising x is lowest; the middle one where they lie on a line."""
    (left, a), (middle, b), (right, c) = points
    first, second = (a - b) / (left - middle), (c - b) / (right - middle)
    bend = (second - first) / (right - left)
    # three equal losses: no parabola
    if bend <= 0:
        return middle
    return middle - (first - bend * (left - middle)) / (2 * bend)


def slope_of(points: Iterable[tuple[float, float]]) -> float | None:
    """dy/dx of the least-squares line through (x, y); None where fewer than two places x were given.

    Example:
        >>> slope_of([(0, -7), (-2, -6), (-4, -5)])
        -0.5
    """
    pairs = list(points)
    if len({x for x, _ in pairs}) < 2:
        return None
    mean_x, mean_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    x_axis = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / x_axis


def regret(curve: Curve, rate: float) -> float:
    """What using a given rate costs: its loss over the best one, less 1; infinite if it diverged, NaN if not tried.

    Example:
        >>> regret({-2: 1.0, -1: 1.5}, -1)
        0.5
    """
    here = curve.get(rate, math.nan)
    best = min((loss for loss in curve.values() if math.isfinite(loss)), default=math.nan)
    return here if math.isinf(here) else here / best - 1


def collapse(curve: Curve, dense: Curve) -> float:
    """How far two curves lie apart below both optima: the largest |log loss − log loss|.

    Infinite where only one of the two converges, NaN without common rates or where both diverge at every rate.

    Example:
        >>> round(collapse({-2: 2.0, -1: 1.0, 0: 3.0}, {-2: 1.0, -1: 0.5, 0: 9.0}), 3)
        0.693
    """
    # beyond an optimum instability decides the loss, at another rate for each model
    top = min((best for best in (optimum(curve).grid, optimum(dense).grid) if not math.isnan(best)), default=math.nan)
    common = [x for x in curve if x in dense and x <= top]
    if not all(math.isfinite(curve[x]) and math.isfinite(dense[x]) for x in common):
        return math.inf
    return max((abs(math.log(curve[x]) - math.log(dense[x])) for x in common), default=math.nan)


def mean_curve(curves: Sequence[Curve]) -> dict[float, float]:
    """Average repetitions; a rate at which one of them diverged has an infinite loss, one that some lack is dropped.

    Example:
        >>> mean_curve([{-1: 1.0, 0: 2.0}, {-1: 3.0, 0: float("inf")}])
        {-1: 2.0, 0: inf}
    """
    common = [x for x in curves[0] if all(x in curve for curve in curves)] if curves else []
    return {x: fmean(curve[x] for curve in curves) for x in sorted(common)}


def bootstrap(
    statistic: Callable[[Sequence[int]], float | None], seeds: Sequence[int], *, draws: int = 400, share: float = 0.95
) -> tuple[float, float] | None:
    """Resample seeds with replacement and return an interval of a statistic of them; None with fewer than two seeds.

    A sample without a value (None or NaN) is left out; one with an infinite value counts, and an end may be infinite.
    With three seeds there are ten different samples: the interval says how much the seeds differ, no more.
    """
    if len(seeds) < 2:
        return None
    picks = torch.randint(len(seeds), (draws, len(seeds)), generator=stream(0, "transfer", "bootstrap"))
    known: dict[tuple[int, ...], float | None] = {}
    values = []
    for pick in picks.tolist():
        # sorted: the mean of a sample has no order, and three seeds have only ten samples to compute
        sample = tuple(sorted(seeds[at] for at in pick))
        if sample not in known:
            known[sample] = statistic(sample)
        value = known[sample]
        if value is not None and not math.isnan(value):
            values.append(value)
    if not values:
        return None
    ends = torch.quantile(
        torch.tensor(values, dtype=torch.float64), torch.tensor([0.5 - share / 2, 0.5 + share / 2]).double()
    )
    # between two infinite values, or a finite and an infinite one, torch finds NaN
    low, high = ends.where(~ends.isnan(), math.inf).tolist()
    return low, high
