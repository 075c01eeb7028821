"""Differences between methods on the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.valley.numbers import T95, bounds, mean


def differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return a − b for every seed that both have, in the order of the seeds."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def verdict(values: Sequence[float]) -> str:
    """Whether the 95 % t-interval of the mean lies above zero, below it, or has it inside."""
    if len(values) not in T95:
        return "–"
    low, high = bounds(values)
    return "above zero" if low > 0 else "below zero" if high < 0 else "has zero"


def shown(values: Sequence[float], digits: int = 1) -> str:
    """Mean difference with its interval, in the unit of the values."""
    return mean(values, digits)
