"""Checks of a method's settings, made where it is built."""

from __future__ import annotations

import operator
from typing import Any

from sparing.errors import UserError
from sparing.hypergrad.forward_mode.directions import Law


def require_count(name: str, value: Any, why: str, *, least: int = 1, do: str = "") -> None:
    """Refuse anything but a whole number, Python's or NumPy's, of at least ``least``."""
    try:
        fits = operator.index(value) >= least
    except TypeError:
        fits = False
    if not fits:
        raise UserError(name, got=value, why=why, do=do or f"pass a whole number >= {least}")


def require_law(law: Any) -> None:
    """Refuse anything but a law of directions; a class has the methods of one, but not bound to anything."""
    if isinstance(law, type) or not isinstance(law, Law):
        got = law.__name__ if isinstance(law, type) else repr(law)
        raise UserError("law", got=got, why="a law of directions is a value", do="pass one, such as Rademacher()")
