"""The rule for headlines: on drawn numbers, a difference is named only where its interval excludes zero."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.jobs.demo.finding import NOTHING_SHOWN, ONE_RUN, Difference, lowest
from sparing.report import format_number
from sparing.seeds import stream

GAPS = st.lists(st.floats(-50, 50).map(lambda x: round(x, 3)), min_size=1, max_size=6)
T_975_OF_2 = 4.302653  # Student's quantile at two degrees of freedom, by the closed form below

LARGE = 100.0  # points, against which no interval of numbers up to 50 is silent


def student_of_two(share: float) -> float:
    """The quantile at two degrees of freedom in closed form, a (2 / (1 − a²))½ with a = 2 share − 1."""
    a = 2 * share - 1
    return a * math.sqrt(2 / (1 - a * a))


def test_the_interval_of_three_is_student_s():
    found = Difference.of([1.0, 2.0, 4.0], "points")
    mean, spread = 7 / 3, math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert student_of_two(0.975) == pytest.approx(T_975_OF_2, rel=1e-6)
    half = T_975_OF_2 * spread / math.sqrt(3)
    # the quantile above has seven digits
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-6)


@given(GAPS)
def test_a_headline_names_a_difference_only_where_its_interval_excludes_zero(gaps: list[float]):
    found = Difference.of(gaps, "points")
    excluded = found.low > 0 or found.high < 0
    assert found.shown == excluded
    assert (found.headline == NOTHING_SHOWN) == (not excluded)
    assert (NOTHING_SHOWN in found.whole) == (not excluded)
    word = found.says("better", "worse")
    assert word == (NOTHING_SHOWN if not excluded else "better" if found.mean > 0 else "worse")
    if excluded:
        # no headline smaller than its own interval's reach
        assert abs(found.mean) > (found.high - found.low) / 2
        assert re.fullmatch(r"[+−]\d+\.\d points", found.headline)


@given(st.floats(-LARGE, LARGE))
def test_one_run_shows_nothing_however_large(gap: float):
    found = Difference.of([gap], "points")
    assert found.headline == NOTHING_SHOWN
    assert found.interval == ONE_RUN
    assert found.beside("seeds").endswith(f" {ONE_RUN}")


def test_beside_a_headline_stands_what_it_does_not_say():
    shown, hidden = Difference.of([1.0, 1.1, 1.2], "points"), Difference.of([-1.0, 2.0], "points")
    assert shown.beside("seeds") == f"{shown.interval} seeds"
    assert hidden.beside("seeds") == f"+0.5 points {hidden.interval} seeds"


@pytest.mark.parametrize("n", [2, 3, 5])
def test_of_equal_methods_one_in_twenty_is_called_different(n: int):
    """Drawn from one law, the rule is wrong in 5 % of the cases; a shift of five deviations is mostly found."""
    gen, draws = stream(0, "tests", "finding", n), 4000
    noise = torch.randn(draws, n, generator=gen, dtype=torch.float64)
    called = sum(Difference.of(row).shown for row in noise.tolist()) / draws
    # binomial: four standard errors of 0.05 over 4,000 draws
    assert abs(called - 0.05) < 4 * math.sqrt(0.05 * 0.95 / draws)
    if n > 2:
        found = sum(Difference.of(row).says("up", "down") == "up" for row in (noise + 5).tolist()) / draws
        assert found > 0.8


def test_ratios_are_averaged_and_bounded_by_their_logarithms():
    found = Difference.of_ratios([2.0, 4.0, 8.0])
    assert found.text == "4.0×"
    half = T_975_OF_2 * math.log(2) / math.sqrt(3)
    assert found.high == pytest.approx(math.log(4) + half, rel=1e-6)
    low, high = (format_number(math.exp(end), "×") for end in (found.low, found.high))
    assert found.interval.replace("\N{NO-BREAK SPACE}", " ") == f"[{low}, {high}], n = 3"
    assert found.headline == NOTHING_SHOWN  # an interval of ratios that holds 1
    assert Difference.of_ratios([3.9, 4.0, 4.1]).headline == "4.0×"


def test_a_bound_keeps_its_sign():
    found = Difference.of([math.log(4.8), math.log(4.9)], "×", bound=True)
    assert found.headline.startswith("≥ 4.8")
    assert Difference.of([math.nan, math.nan], "×", bound=True).text == "unknown"


def test_lowest_is_below_every_other_or_nobody():
    low, high = [1.0, 1.1, 1.2], [2.0, 2.2, 2.1]
    assert lowest({"a": high, "b": low}) == "b"
    near = [value + shift for value, shift in zip(low, (0.1, -0.05, 0.0), strict=True)]
    assert lowest({"a": high, "b": low, "c": near}) is None
