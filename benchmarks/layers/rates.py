"""The sweep of rates: five at half octaves around a first guess, then further on the side where the best lies."""

from __future__ import annotations

import math
from collections.abc import Mapping

FIRST = (-2, -1, 0, 1, 2)
REACH = 12
"""Half octaves from the first guess beyond which no rate is tried; a best rate that far out is told of."""


def best(found: Mapping[int, float]) -> int:
    """The rate (half octaves) of the least loss; of equal losses the smaller rate."""
    return min(sorted(found), key=found.__getitem__)


def inside(found: Mapping[int, float]) -> bool:
    """Whether the best rate has tried ones on both sides, and learns."""
    return math.isfinite(found[best(found)]) and min(found) < best(found) < max(found)


def asked(centre: int, found: Mapping[int, float]) -> list[int]:
    """Rates to try next: what of the first five is missing, then the neighbour of a best one at the edge.

    Example:
        >>> asked(-20, {}), asked(0, {-2: 3.0, -1: 2.0, 0: 1.0, 1: 0.9, 2: 0.8}), asked(0, {-1: 2.0, 0: 1.0, 1: 2.0})
        ([-22, -21, -20, -19, -18], [3], [-2, 2])
    """
    if missing := [centre + step for step in FIRST if centre + step not in found]:
        return missing
    if inside(found):
        return []
    # where everything diverged, smaller rates are the only hope
    beyond = max(found) + 1 if best(found) == max(found) and math.isfinite(found[best(found)]) else min(found) - 1
    return [beyond] if abs(beyond - centre) <= REACH else []
