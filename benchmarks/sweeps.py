"""Sweeps of one rate that go on until the best rate is inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

SMALLEST = 1e-5
"""Where a sweep ends in any case: a best rate there means that no step helps."""


def inside(rates: Sequence[float], score: Callable[[float], float]) -> tuple[float, dict[str, float]]:
    """The rate of lowest score; the sweep goes on by its own factor until that rate has neighbours on both sides."""
    factor, tried = rates[1] / rates[0], {rate: score(rate) for rate in rates}
    while True:
        # NaN is below nothing
        best = min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
        if min(tried) < best < max(tried) or best <= SMALLEST:
            return best, {f"{rate:g}": tried[rate] for rate in sorted(tried)}
        rate = float(f"{best / factor if best == min(tried) else best * factor:.2g}")
        tried[rate] = score(rate)
