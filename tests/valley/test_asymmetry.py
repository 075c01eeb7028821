"""Numbers of hand-made curves, against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from sparing.valley.scans import asymmetry as asym

AT = np.linspace(-1, 1, 21)


def cubic(c, at=AT):
    return 0.25 + at**2 + c * at**3


@pytest.mark.parametrize("c", [-0.9, -0.3, 0.0, 0.5])
def test_index_of_a_quadratic_with_a_cubic(c):
    """Over k/10, k = 1 … 10: mean k² / 100 = .385 and mean k³ / 1000 = .3025, so AI = −c · .3025 / .385."""
    assert asym.index(AT, cubic(c)) == pytest.approx(-c * 0.3025 / 0.385, abs=1e-14)


def test_branch_means_of_a_quadratic_with_a_cubic():
    found = asym.branch_means(AT, cubic(0.5))
    assert found.minus == pytest.approx(0.25 + 0.385 - 0.5 * 0.3025, abs=1e-15)
    assert found.plus == pytest.approx(0.25 + 0.385 + 0.5 * 0.3025, abs=1e-15)
    assert found.rise_minus == pytest.approx(found.minus - 0.25, abs=1e-15)
    assert found.log_ratio == pytest.approx(math.log((0.385 - 0.15125) / (0.385 + 0.15125)), abs=1e-14)


def test_order_of_positions_does_not_matter():
    order = np.random.default_rng(0).permutation(21)
    f = cubic(0.5)
    assert asym.index(AT[order], f[order]) == pytest.approx(asym.index(AT, f), abs=1e-15)
    assert asym.half_widths(AT[order], f[order], 0.2) == asym.half_widths(AT, f, 0.2)
    assert asym.odd_even(AT[order], f[order]).odd.tolist() == asym.odd_even(AT, f).odd.tolist()


def test_below_the_floor_the_index_is_not_a_number():
    f = cubic(0.5)  # |N| + |P| = 2 · .385
    assert math.isnan(asym.index(AT, f, floor=0.771))
    assert not math.isnan(asym.index(AT, f, floor=0.769))
    assert math.isnan(asym.index(AT, np.ones(21)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 0, 1], 1.0),
        ([1, 0, math.inf], -1.0),
        ([math.inf, 0, math.inf], math.nan),
        ([math.nan, 0, math.inf], math.nan),
        ([1, 0, math.nan], math.nan),
        ([1, math.inf, 1], math.nan),
    ],
)
def test_infinite_sides_are_limits(values, expected):
    assert asym.index([-1, 0, 1], values) == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=7, max_size=7))
def test_mirroring_turns_the_sign(values):
    at = np.arange(-3, 4)
    a, b = asym.index(at, values), asym.index(-at, values)
    assert (math.isnan(a) and math.isnan(b)) or a == -b
    assert math.isnan(a) or -1 <= a <= 1


def test_half_widths_are_interpolated():
    at = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    f = np.array([9.0, 3.0, 1.0, 1.5, 5.0])
    # left: 2 at 1, 8 at 2, so 4 at 1 + 2/6; right: .5 at 1, 4 at 2, so 4 at 2
    assert asym.half_widths(at, f, 4.0) == (pytest.approx(4 / 3, abs=1e-15), 2.0)
    assert asym.half_widths(at, f, 1.0) == (0.5, pytest.approx(1 + 0.5 / 3.5, abs=1e-15))
    assert asym.half_widths(at, f, 100.0) == (math.inf, math.inf)


def test_half_widths_of_a_parabola_tend_to_the_root():
    """Chords lie above a parabola by h²/4 at most, h the spacing: the width is short by h²/4 / (2 √rise)."""
    at = np.linspace(-1, 1, 2001)
    left, right = asym.half_widths(at, at**2, 0.3)
    assert left == pytest.approx(right, abs=1e-15)
    assert 0 <= math.sqrt(0.3) - right <= 1e-6 / 4 / (2 * math.sqrt(0.3)) + 1e-15


def test_half_widths_before_infinite_and_missing_values():
    assert asym.half_widths([-1, 0, 1], [math.inf, 0.0, math.nan], 1.0) == (0.0, pytest.approx(math.nan, nan_ok=True))


@pytest.mark.parametrize("c", [-0.9, 0.0, 0.5])
@pytest.mark.parametrize("reach", [1.0, 1e-3, 50.0])
def test_odd_and_even_parts_and_the_cubic_index(c, reach):
    at = AT * reach
    found = asym.odd_even(at, cubic(c, at))
    right = at[11:]
    # the values are rounded at 0.25 + f, parts are found to that
    room = 1e-15 * (1 + np.abs(cubic(c, at)).max())
    np.testing.assert_allclose(found.odd, c * right**3, rtol=0, atol=room)
    np.testing.assert_allclose(found.even, right**2, rtol=0, atol=room)
    assert found.cubic == pytest.approx(c, abs=1e-3 if reach < 1 else 1e-10)  # at 1e-3 the cubic is 1e-9 of 0.25


def test_cubic_index_does_not_believe_one_wild_point():
    f = cubic(0.5)
    clean = asym.odd_even(AT, f, near=1.0).cubic
    f[15] += 3.0
    assert abs(asym.odd_even(AT, f, near=1.0).cubic - clean) < 0.1


def test_cubic_index_of_a_falling_line_with_linear_part():
    at = AT
    assert asym.odd_even(at, 2 * at + at**2 - 0.4 * at**3 + 0.7 * at**4).cubic == pytest.approx(-0.4, abs=1e-12)


def test_cubic_index_is_missing_where_it_cannot_be_fitted():
    assert math.isnan(asym.odd_even([-1, 0, 1], [1.0, 0.0, 1.0]).cubic)
    assert math.isnan(asym.odd_even(AT, np.full(21, 2.0)).cubic)
    assert math.isnan(asym.odd_even(AT, np.where(np.arange(21) == 9, np.nan, AT**2)).cubic)


@pytest.mark.parametrize(
    ("at", "values"),
    [([-1, 1], [1, 1]), ([0, 1], [0, 1]), ([-1, 0], [1, 0]), ([-1, 0, 0, 1], [1, 0, 0, 1]), ([-1, 0, 1], [1, 0]),
     ([-1, 0, math.inf], [1, 0, 1])],
)  # fmt: skip
def test_a_curve_needs_a_bottom_and_two_sides(at, values):
    refused(r"lambdas|curve", asym.index, at, values)


def test_refusals():
    refused("mirror images", asym.odd_even, [-2, 0, 1], [1, 0, 1])
    refused("rise", asym.half_widths, AT, AT**2, 0.0)
    refused("near", asym.odd_even, AT, AT**2, near=0.0)


def test_noise_floors():
    f = np.where(AT == 0, 0.0, 0.1)
    share = 0.1 * 20 / 21
    assert asym.noise_floor("error", AT, f, 400) == pytest.approx(2 * math.sqrt(share * (1 - share) / 400), rel=1e-12)
    assert asym.noise_floor("error", AT, 0 * f, 500) == pytest.approx(2 / 500 * math.sqrt(1 - 1 / 500), rel=1e-12)
    assert asym.noise_floor("loss", AT, 3 + f, 400) == pytest.approx(2 * 3 / 20, rel=1e-12)
    assert asym.noise_floor("loss", AT, 3 + f, None) == asym.noise_floor("margin", AT, f, 400) == 0.0


def test_floor_of_an_error_is_two_standard_errors_of_a_binomial():
    """The spread of the share of wrong rows among n, drawn again and again, is half the floor."""
    rng = np.random.default_rng(0)
    shares = rng.binomial(500, 0.08, size=20_000) / 500
    floor = asym.noise_floor("error", [-1, 0, 1], [0.08, 0.08, 0.08], 500)
    # a standard deviation from 20,000 numbers is known to 1/√40,000 = 0.5 %; 4 of these
    assert shares.std() == pytest.approx(floor / 2, rel=0.02)
