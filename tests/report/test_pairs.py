"""Comparisons on the same rows, against scipy, closed forms and their own coverage."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from sparing.errors import UserError
from sparing.report.pairs import McNemar, _resampled, _widened, can_bound, mcnemar, paired_bootstrap


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 3), (10, 2), (40, 11), (700, 641), (51_000, 50_300)])
def test_the_p_value_is_the_exact_binomial_one(b: int, c: int):
    expected = stats.binomtest(min(b, c), b + c, 0.5).pvalue if b + c else 1.0
    # lgamma of 1e5 has an absolute error of 1e-10, which is the relative one of p.
    assert McNemar(b, c, 200_000).p == pytest.approx(expected, rel=1e-8)
    assert McNemar(c, b, 200_000).p == McNemar(b, c, 200_000).p


def test_rows_on_which_the_models_agree_change_no_p_value():
    first, second = torch.tensor([1, 1, 1, 0, 1]), torch.tensor([0, 0, 1, 1, 0])
    more = mcnemar(torch.cat([first, torch.ones(1000)]), torch.cat([second, torch.ones(1000)]))
    few = mcnemar(first, second)
    assert (few.first_only, few.second_only, few.p, few.z) == (3, 1, more.p, more.z)
    assert few.difference == pytest.approx(2 / 5)
    assert more.difference == pytest.approx(2 / 1005)
    assert few.z == pytest.approx(2 / math.sqrt(4))


def test_what_separate_intervals_hide_is_seen():
    # .907 against .880 of 2,000 rows: the intervals overlap, and 4.6 standard errors lie between them.
    first, second = torch.ones(2000), torch.ones(2000)
    first[:186] = 0
    second[:240] = 0
    assert mcnemar(first, second).p < 1e-15
    assert stats.norm.sf(mcnemar(first, second).z) < 1e-12


def test_the_interval_agrees_with_scipys_bootstrap():
    draws = torch.randn(200, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = paired_bootstrap(draws[:, 0], draws[:, 1], seed=5)
    gaps = ((draws[:, 0] - draws[:, 1]).numpy(),)
    theirs = stats.bootstrap(gaps, lambda x, axis: x.mean(axis), n_resamples=4000, method="percentile", rng=1)
    low, high = theirs.confidence_interval
    # The ends of 4,000 resamples waver by about 4 % of the half-width, and ours lie 1 % further out.
    assert mine.interval == pytest.approx((low, high), abs=0.1 * (high - low) / 2)
    assert mine == paired_bootstrap(draws[:, 0], draws[:, 1], seed=5)
    assert mine.interval != paired_bootstrap(draws[:, 0], draws[:, 1], seed=6).interval
    assert mine.mean == pytest.approx(float(gaps[0].mean()), abs=1e-15)


def test_the_moved_level_is_that_of_students_law():
    for n in (10, 20, 100, 5000):
        expected = stats.norm.cdf(math.sqrt(n / (n - 1)) * stats.t.ppf(0.025, n - 1))
        assert _widened(0.025, n) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("n", [10, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(n: int):
    source = torch.Generator().manual_seed(n)
    held = 0
    for trial in range(400):
        gaps = torch.randn(n, generator=source, dtype=torch.float64)
        low, high = paired_bootstrap(gaps, torch.zeros(n), seed=trial, resamples=1000).interval
        held += low <= 0 <= high
    # 400 intervals of 95 %: three standard deviations are 0.033.
    assert held / 400 == pytest.approx(0.95, abs=0.033)


def test_what_is_no_pair_is_refused():
    with pytest.raises(UserError, match=r"rows: got shapes \(3,\) and \(2,\); row i of both is the same row; pass two"):
        mcnemar([1, 0, 1], [1, 0])
    with pytest.raises(UserError, match="rows: got 0; a test needs a row; pass 1 or more"):
        mcnemar([], [])
    with pytest.raises(UserError, match="other numbers than 0 and 1; a row is right or wrong"):
        mcnemar([0.5, 1.0], [1.0, 1.0])
    with pytest.raises(UserError, match="rows: got 4; the interval of fewer holds the truth too seldom; pass 10"):
        paired_bootstrap([1, 2, 3, 4], [1, 2, 3, 5])
    with pytest.raises(UserError, match="not finite; their mean says nothing"):
        paired_bootstrap([math.nan] * 10, [1.0] * 10)
    with pytest.raises(UserError, match="level: got 95"):
        paired_bootstrap([1.0] * 10, [1.0] * 10, level=95)


def test_the_score_interval_ends_where_the_likeliest_law_is_rejected():
    first, second = torch.zeros(44), torch.zeros(44)
    first[:1] = 1
    low, high = paired_bootstrap(first, second).interval
    for end in (low, high):  # the share of rows that only the second has right is found on a grid, not by the formula
        shares = torch.linspace(max(0.0, -end), 1, 200_001, dtype=torch.float64)[:-1]
        b, c, rest = 1, 0, 43
        logs = torch.special.xlogy(torch.tensor(b), shares + end) + torch.special.xlogy(torch.tensor(c), shares)
        inside = (shares + end >= 0) & (1 - 2 * shares - end > 0)
        logs = torch.where(inside, logs + rest * torch.log((1 - 2 * shares - end).clamp(min=1e-300)), -math.inf)
        share = float(shares[logs.argmax()])
        spread = 44 * (2 * share + end * (1 - end))
        assert abs(b - c - 44 * end) / math.sqrt(spread) == pytest.approx(
            stats.norm.ppf(0.975), rel=1e-3
        )  # the grid's step


@pytest.mark.parametrize(("n", "b", "c"), [(50, 0.02, 0.0), (100, 0.02, 0.0), (100, 0.03, 0.01), (1000, 0.005, 0.001)])
def test_rows_of_right_and_wrong_hold_the_truth_however_few_differ(n, b, c):
    """Exactly summed over both counts, by the trinomial law: no Monte Carlo error.

    A resampling held the truth in 66 % of the first case, and in 88 % of the second.
    """
    held = total = 0.0
    most = 8 + int(4 * n * (b + c))  # beyond lies less than 1e-4
    for i in range(most):
        for j in range(most if c else 1):
            share = stats.multinomial.pmf([i, j, n - i - j], n, [b, c, 1 - b - c])
            first, second = torch.zeros(n), torch.zeros(n)
            first[:i] = 1
            second[i : i + j] = 1
            low, high = paired_bootstrap(first, second).interval
            assert low < high
            held += share * (low <= b - c <= high)
            total += share
    assert total > 1 - 1e-4
    # A score interval of counts is of 95 % on average over shares; at one share it may lie 3 points below.
    assert held > 0.92


def test_nothing_and_everything_that_differs_have_ends_in_the_range():
    same = paired_bootstrap(torch.zeros(50), torch.zeros(50)).interval
    # b = c = 0: q = 0 on the side that is asked, and n δ² = 1.96² δ (1 − δ)
    end = stats.norm.ppf(0.975) ** 2 / (50 + stats.norm.ppf(0.975) ** 2)
    assert same == pytest.approx((-end, end), rel=1e-9)
    low, high = paired_bootstrap(torch.ones(50), torch.zeros(50)).interval
    # b = n: q = (1 − δ)/2, and n (1 − δ)² = 1.96² (1 − δ²)
    assert (low, high) == (pytest.approx(1 - 2 * end, rel=1e-9), 1.0)


def test_of_many_rows_students_interval_agrees_with_the_bootstraps():
    source = torch.Generator().manual_seed(0)
    gaps = torch.empty(12_000, dtype=torch.float64).exponential_(generator=source)
    low, high = paired_bootstrap(gaps, torch.zeros(12_000)).interval
    drawn = _resampled(gaps, 0.025, 1000, source)
    # An end of 1,000 resamples has a standard deviation of 4 % of the half-width; skewness moves it by 1 %.
    assert drawn == pytest.approx((low, high), abs=0.15 * (high - low) / 2)


def test_a_million_rows_take_no_resampling():
    rows = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = paired_bootstrap(rows, torch.zeros(1_000_000)).interval
    assert high - low == pytest.approx(2 * 1.96 * float(rows.std()) / 1000, rel=1e-4)


def test_few_rows_that_differ_have_no_interval_of_other_numbers():
    first, second = torch.zeros(100), torch.zeros(100)
    first[:4] = 0.5
    assert not can_bound(first, second)
    with pytest.raises(UserError, match=r"rows: got 4 of 100 that differ; .* too seldom; measure more rows"):
        paired_bootstrap(first, second)
    first[:10] = 0.5
    assert can_bound(first, second)
    assert can_bound(torch.zeros(10), torch.zeros(10))
    assert not can_bound(torch.zeros(9), torch.zeros(9))
