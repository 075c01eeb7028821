"""Means with intervals and rank statistics, as the tables show them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Row = Mapping[str, Any]
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a 95 % interval of the mean, by number of values; two give none worth its name."""
MINUS = "\N{MINUS SIGN}"


def finite(values: Iterable[Any]) -> list[float]:
    """The values that are numbers: None and NaN are left out."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the 95 % t-interval of the mean."""
    reach = T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - reach, fmean(values) + reach


def mean(values: Iterable[Any], digits: int = 2, *, sign: bool = True) -> str:
    """Mean and 95 % t-interval; the number of values in brackets where some are not defined."""
    given = list(values)
    known = finite(given)
    if not known:
        return "–"
    form = f"{'+' if sign else ''}.{digits}f"
    text = f"{fmean(known):{form}}"
    if len(known) in T95:
        low, high = bounds(known)
        text += f" [{low:{form}}, {high:{form}}]"
    text = text.replace("-", MINUS)
    return text if len(known) == len(given) else f"{text} ({len(known)} of {len(given)})"


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of two sequences."""
    first, second = ([value - fmean(one) for value in one] for one in (a, b))
    size = math.sqrt(sum(v * v for v in first) * sum(v * v for v in second))
    return sum(x * y for x, y in zip(first, second, strict=True)) / size if size else math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks, equals sharing the middle of theirs."""
    order = sorted(values)
    return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    return pearson(ranks(a), ranks(b))


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's τ: concordant less discordant pairs, as a share of all."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
    return sum((s > 0) - (s < 0) for s in signs) / len(pairs)


def asymmetry(row: Row, metric: str) -> float | None:
    """The asymmetry index of a scan's row."""
    value: float | None = row[metric]["ai"]
    return value


def branches(row: Row, metric: str) -> tuple[float, float]:
    """Mean of a curve left and right of its middle."""
    curve = row[metric]["curve"]
    half = len(curve) // 2
    return fmean(curve[:half]), fmean(curve[half + 1 :])
