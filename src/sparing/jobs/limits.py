"""Bounds that settings of many jobs share; each refusal is one line that names the setting."""

from __future__ import annotations

import math

from sparing.errors import require

MOST = 2**31 - 1
"""What any count is at most: sizes and loops of the libraries below end there."""


def at_least(
    least: int, settings: object, *names: str, why: str = "it is a count", within: str = "", most: float = MOST
) -> None:
    """Refuse settings that are too small, infinite or not a number, and whole numbers that are absurdly large.

    Args:
        least: Smallest value that works.
        settings: Holds them as attributes; one that is None was not given and passes.
        names: Which of them.
        why: Why a smaller one cannot work.
        within: What the command line writes before the names, such as ``pinn.``.
        most: Largest whole number that works; of fractions, as far as another one is given.

    Raises:
        UserError: If one is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> at_least(1, SimpleNamespace(batch=0, steps=None), "steps", "batch", why="it counts rows")
        Traceback (most recent call last):
        sparing.errors.UserError: batch: got 0; it counts rows; pass 1 or more
    """
    for name in names:
        value = getattr(settings, name)
        require(value is None or least <= value < math.inf, within + name, value, why, f"pass {least} or more")
        fine = value is None or (isinstance(value, float) and most == MOST) or value <= most
        require(fine, within + name, value, f"it is more than {most:g}", f"pass {least} to {most:g}")


def positive(
    settings: object,
    *names: str,
    why: str = "it is a positive finite size",
    do: str = "pass a number above 0",
    within: str = "",
) -> None:
    """Refuse settings that are zero, negative, infinite or not a number.

    Args:
        settings: Holds them as attributes; one that is None was not given and passes.
        names: Which of them.
        why: Why another one cannot work.
        do: What to pass.
        within: What the command line writes before the names, such as ``pinn.``.

    Raises:
        UserError: If one is out of range.
    """
    for name in names:
        value = getattr(settings, name)
        require(value is None or 0 < value < math.inf, within + name, value, why, do)
