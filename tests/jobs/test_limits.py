"""Bounds of settings: what is on the bound, what is not a number, what was not given."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sparing.errors import UserError
from sparing.jobs.limits import at_least, positive


def test_the_least_value_and_none_pass() -> None:
    settings = SimpleNamespace(a=2, b=None, c=1e9)
    at_least(2, settings, "a", "b", "c")
    positive(settings, "a", "b", "c")


@pytest.mark.parametrize("value", [1, -5, 1.999, math.inf, -math.inf, math.nan])
def test_what_is_too_small_or_no_number_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=rf"pinn\.a: got {value}; it is a count; pass 2 or more"):
        at_least(2, SimpleNamespace(a=value), "a", within="pinn.")


@pytest.mark.parametrize("value", [0, 0.0, -1e-300, math.inf, math.nan])
def test_what_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=rf"b: got {value}; no step; pass one"):
        positive(SimpleNamespace(a=5e-324, b=value), "a", "b", why="no step", do="pass one")
