"""Bounds of settings: what is on the bound, what is not a number, what was not given, and what a group belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from sparing.errors import UserError
from sparing.jobs.limits import AtLeast, Between, Checked, Count, Group, Positive, Several, Share, Size


@dataclass(frozen=True, kw_only=True)
class Inner(Group, name="inner", flag="method", choices=("two",)):
    a: Annotated[int, AtLeast(2)] = 2


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    method: str = "one"
    count: Count | None = None
    size: Size = 5e-324
    counts: tuple[Count, ...] = ()
    shares: Annotated[tuple[Share, ...], Several()] = (0.0, 1.0)
    inner: Inner = field(default_factory=Inner)


def test_values_on_a_bound_and_none_pass() -> None:
    Settings(count=1, counts=(1, 2**31 - 1))
    Settings()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"count": 0}, "count: got 0; it is a count; pass 1 or more"),
        ({"count": 2**31}, r"count: got 2147483648; it is more than 2.14748e\+09"),
        ({"counts": (1, -5)}, "counts: got -5"),
        ({"size": 0.0}, "size: got 0.0; it is a positive finite size"),
        ({"shares": ()}, "shares: got none; nothing would be done"),
        ({"shares": (0.5, 0.5)}, "a value stands there twice"),
        ({"shares": (0.5, 1.5)}, "shares: got 1.5; it is a share"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Settings(**wrong)  # type: ignore[arg-type]


def test_a_setting_of_a_group_is_named_with_it() -> None:
    with pytest.raises(UserError, match=r"inner\.a: got 1; it is a count; pass 2 or more"):
        Inner(a=1)


@pytest.mark.parametrize("value", [1, -5, 1.999, math.inf, -math.inf, math.nan])
def test_what_is_too_small_or_no_number_is_refused(value: float) -> None:
    with pytest.raises(UserError, match="a: got"):
        AtLeast(2).check("a", value)


@pytest.mark.parametrize("value", [0, 0.0, -1e-300, math.inf, math.nan])
def test_what_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"b: got .*; no step; pass one"):
        Positive(why="no step", do="pass one").check("b", value)


@pytest.mark.parametrize(
    ("bound", "value", "fine"),
    [
        (Between(), 0, True), (Between(), 1, True), (Between(), 1.0000001, False), (Between(), math.nan, False),
        (Between(above=True), 0, False), (Between(above=True), 1, True),
        (Between(below=True), 0, True), (Between(below=True), 1, False),
    ],
)  # fmt: skip
def test_a_share_lies_between_its_ends(bound: Between, value: float, fine: bool) -> None:
    if fine:
        bound.check("c", value)
    else:
        with pytest.raises(UserError, match="c: got"):
            bound.check("c", value)


def test_a_group_is_in_use_where_its_method_is_chosen() -> None:
    assert not Settings().inner.in_use(Settings())
    assert Settings().inner.in_use(Settings(method="two"))
