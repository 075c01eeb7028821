"""Comparisons on the same rows, against scipy, closed forms and their own coverage."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from sparing.errors import UserError
from sparing.report.pairs import McNemar, _outward, mcnemar, paired_bootstrap


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
        assert _outward(0.025, n) == pytest.approx(expected, rel=0.02)


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
