"""The learning rate as a pure function of the step: a linear rise, then flat, a straight line or half a cosine."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]
"""What follows the rise: half a cosine down to 0, a straight line down to 0, or nothing."""


def rate(step: int, *, peak: float, steps: int, warmup: int = 0, schedule: Schedule = "cosine") -> float:
    """The learning rate of one optimizer step (from 0), in units of ``peak``; above 0 for every step below ``steps``.

    Warm-up step s uses ``peak · (s + 1) / warmup``, so that no step is wasted at 0. After it, cosine and line go from
    ``peak`` at their first step towards 0, which they would reach at step ``steps``.

    Example:
        >>> [rate(s, peak=1.0, steps=6, warmup=2) for s in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.5]
        >>> [rate(s, peak=1.0, steps=6, warmup=2, schedule="linear") for s in (0, 1, 2, 3, 4)]
        [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - (step - warmup) / (steps - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
