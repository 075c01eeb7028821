"""Sweeps of one rate that go on until the best is inside, and what verbs that keep an optuna study share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from sparing.errors import UserError

SMALLEST: Final = 1e-5
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


def needed() -> Any:
    """Return optuna, or say how to install it."""
    try:
        import optuna
    except ImportError:
        do = "run: pip install 'sparing[sweep]'"
        raise UserError("optuna", got="no such package", why="it keeps the runs of a study", do=do) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
