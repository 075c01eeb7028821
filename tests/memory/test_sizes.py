"""Amounts of memory: sums, words to bytes, bytes to words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.memory import Bytes, Profile, format_bytes, parse_bytes

amounts = st.builds(Bytes, *[st.integers(0, 2**50)] * 5)


@given(amounts, amounts, amounts)
def test_bytes_add_as_their_totals_do_and_in_any_order(a, b, c):
    assert (a + b).total == a.total + b.total
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Bytes() == a


def test_a_profile_adds_as_the_bytes_of_its_peak():
    profile = Profile(params=1, grads=2, optimizer=3, activations=4, transient=5, phases={"forward": Bytes(params=9)})
    assert profile.total == 15
    assert profile + Bytes(grads=1) == Bytes(1, 3, 3, 4, 5)
    assert sum([profile, profile], Bytes()) == Bytes(2, 4, 6, 8, 10)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 1.5 MB ", 1_500_000),
        ("0.1kB", 100),
        ("1PiB", 2**50),
        ("123", 123),
        (123, 123),
        ("0.5B", 1),  # half a byte rounds up
        ("0", 0),
    ],
)
def test_amounts_are_read_in_either_kind_of_unit(written, count):
    assert parse_bytes(written) == count


@pytest.mark.parametrize("written", ["24G", "-1GB", "GB", "1e9", "nan", "1.GB", "24 G B", "", "24XB"])
def test_what_is_no_clear_amount_is_refused(written):
    with pytest.raises(UserError, match=r"24GiB"):
        parse_bytes(written)


@given(st.integers(0, 2**59))
def test_written_amounts_read_back_within_half_of_the_last_digit(count):
    back = parse_bytes(format_bytes(count))
    # one decimal of a number that is at least 1: off by at most 0.05, so 5 %
    assert abs(back - count) <= 0.05 * count
    number, unit = format_bytes(count).split()
    assert unit == "B" or 1 <= float(number) <= 1024


def test_small_amounts_are_whole_bytes():
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.0 KiB"
