"""Intervals over draws: how often they hold the truth, and what they are made of."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sparing.errors import UserError
from sparing.valley import bootstrap
from sparing.valley.asymmetry import index

AT = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 99])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.975, 0.995])
def test_student_quantiles_against_scipy(freedom, share):
    assert bootstrap._student(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-10)


@pytest.mark.parametrize("n", [2, 5, 20, 1000])
def test_levels_are_moved_outwards(n):
    expected = stats.norm.cdf(math.sqrt(n / (n - 1)) * stats.t.ppf(0.025, n - 1))
    assert bootstrap.outward(0.025, n) == pytest.approx(expected, rel=1e-8)
    assert bootstrap.outward(0.025, n) < 0.025


def test_moved_levels_give_students_interval_of_normal_means():
    """A resampled mean is about normal with deviation s √((n−1)/n) / √n, s that of the draws: ends at mean ± t s/√n."""
    rows = np.random.default_rng(1).normal(size=40)
    low, high = bootstrap.interval(rows, resamples=40_000)
    half = stats.t.ppf(0.975, 39) * rows.std(ddof=1) / math.sqrt(40)
    # the law of the mean of 40 is normal to about 1 %, and the ends of 40,000 resamples scatter by 1 %
    assert (high - low) / 2 == pytest.approx(half, rel=0.04)
    assert (high + low) / 2 == pytest.approx(rows.mean(), abs=0.04 * half)


@pytest.mark.parametrize(("n", "least"), [(5, 0.89), (10, 0.92), (30, 0.925)])
def test_coverage_of_a_mean(n, least):
    """800 normal samples: the share of 95 % intervals that hold 0 has a standard error of 1.0 % at n = 5, 0.8 % beyond.

    What is asked for stands three of them below what 6000 other samples gave: 0.921 at n = 5, where no resample goes
    beyond the extremes, 0.947 at 10, 0.950 at 30. Plain percentiles gave 0.836, 0.902 and 0.935.
    """
    rng = np.random.default_rng(n)
    held = 0
    for _ in range(800):
        low, high = bootstrap.interval(rng.normal(size=n), resamples=1000)
        held += low <= 0 <= high
    assert least <= held / 800 <= 0.975


def test_coverage_of_an_asymmetry_index():
    """600 samples of 12 draws of f = (2 + noise) λ² − (1 + noise) λ³; the truth is that of the mean curve.

    Means of λ² and |λ|³ over ½ and 1 are .625 and .5625, so AI = 1 · .5625 / (2 · .625) = .45. Standard error 0.9 %.
    """
    truth = index(AT, 2 * AT**2 - AT**3)
    assert truth == pytest.approx(0.45, abs=1e-15)
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        a, c = 2 + rng.normal(scale=0.5, size=(12, 1)), 1 + rng.normal(scale=0.5, size=(12, 1))
        low, high = bootstrap.asymmetry(AT, a * AT**2 - c * AT**3, resamples=800).interval
        held += low <= truth <= high
    assert 0.91 <= held / 600 <= 0.98


def test_value_is_that_of_the_mean_curve():
    draws = np.array([[4.0, 1.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 1.0, 0.0]])
    found = bootstrap.asymmetry(AT, draws)
    assert found.value == index(AT, draws.mean(0)) == pytest.approx((6 - 3) / 9)
    assert found.n == 2


def test_interval_of_three_draws_against_all_27_resamples():
    draws = np.array([1.0, 2.0, 6.0])
    means = sorted(np.mean(choice) for choice in itertools.product(draws, repeat=3))
    tail = bootstrap.outward(0.25, 3)
    low, high = bootstrap.interval(draws, level=0.5, resamples=100_000)
    # each of the 27 has probability 1/27; the levels are not within 4 standard errors (0.14 % each) of a step
    assert min(abs(tail * 27 - k) for k in range(28)) > 4 * 0.0014 * 27
    assert (low, high) == (pytest.approx(means[int(tail * 27)]), pytest.approx(means[26 - int(tail * 27)]))


def test_equal_draws_have_an_interval_of_one_point():
    found = bootstrap.asymmetry(AT, np.tile(AT**2 - 0.5 * AT**3, (5, 1)))
    assert found.interval == (pytest.approx(found.value), pytest.approx(found.value))


def test_one_draw_has_no_interval():
    found = bootstrap.asymmetry(AT, [AT**2])
    assert found.value == 0
    assert all(map(math.isnan, found.interval))
    assert f"{found}" == "+0.00"


def test_below_the_floor_neither_value_nor_interval():
    found = bootstrap.asymmetry(AT, [AT**2, AT**2], floor=10.0)
    assert math.isnan(found.value)
    assert all(map(math.isnan, found.interval))
    assert (found.floor, f"{found}") == (10.0, "not above noise")


def test_resamples_without_a_number_are_left_out_until_they_are_most():
    rise = np.outer(
        [0.0, 0.0, 0.0, 1.0], AT**2
    )  # a resample has a number where the last draw is in it: 1 − .75⁴ = 68 %
    assert bootstrap.asymmetry(AT, rise).interval == (0.0, 0.0)
    rows = np.array([0.0, 0.0, 0.0, 1.0])  # the last draw is in twice or more in 26 %
    low, high = bootstrap.interval(rows, lambda mean: np.where(mean > 0.4, mean, np.nan))
    assert math.isnan(low)
    assert math.isnan(high)


def test_an_infinite_draw_counts_only_where_it_is_drawn():
    means = bootstrap.resampled_means(np.array([[1.0, 2.0], [np.inf, 4.0]]), resamples=200)
    assert set(means[:, 0]) == {1.0, np.inf}
    assert set(means[:, 1]) == {2.0, 3.0, 4.0}
    assert bootstrap.interval([1.0, 1.0, np.inf], resamples=500)[1] == np.inf


def test_seeds_and_formats():
    rows = np.random.default_rng(0).normal(size=9)
    assert bootstrap.interval(rows, seed=1) == bootstrap.interval(rows, seed=1) != bootstrap.interval(rows, seed=2)
    found = bootstrap.Index(value=0.9167, interval=(0.881, 0.949), n=5, floor=0.0)
    assert f"{found}" == "+0.92 [+0.88, +0.95]"
    assert f"{found:.1f}" == "0.9 [0.9, 0.9]"


def test_refusals():
    with pytest.raises(UserError, match="level"):
        bootstrap.interval([1.0, 2.0], level=1.0)
