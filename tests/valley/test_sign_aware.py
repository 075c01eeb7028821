"""The veto by hand: who flips the sign of a base weight, and with how much change."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.seeds import stream
from sparing.valley.merging.sign_aware import SignAware, majority_flips
from sparing.valley.merging.ties import Ties


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Base 1 throughout. Columns:
#   0  τ = −3, −0.5, −0.5: elected −, mean −4/3, wanted −1/3: flips. Model 1 flips (1 − 3 < 0) with 3 of 4: allowed.
#   1  τ = −3, +2, +0.9: elected − (sum −0.1), mean −3, wanted −2: flips. Model 1 flips with 3 of 5.9: allowed.
#   2  τ = −3, +1.6, +1.5: elected + (sum 0.1): no flip wanted, 1 + 1.55.
#   3  τ = −2.4, −0.9, −0.9, −0.9 of four models would flip by a minority: see the test with four models.
#   4  τ = 0.5, 0.25, 0.75: all up, 1 + 0.5.
BASE = vector(1, 1, 1, 1)
TASKS = [vector(-3, -3, -3, 0.5), vector(-0.5, 2, 1.6, 0.25), vector(-0.5, 0.9, 1.5, 0.75)]


def test_flips_that_most_change_asks_for_are_allowed():
    found = SignAware(keep=1.0).tensor("w", [BASE + task for task in TASKS], BASE)
    expected = vector(1 - 4 / 3, -2, 1 + 1.55, 1.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)  # a rounding or two near 1


def test_flips_of_a_minority_are_dropped():
    """τ = −2.6, −0.9, −0.9, −0.9: mean −1.325, wanted −0.325. Only the first flips, with 2.6 of 5.3 < ½: dropped."""
    models = [vector(1 + tau) for tau in (-2.6, -0.9, -0.9, -0.9)]
    assert Ties(keep=1.0).tensor("w", models, vector(1)).item() == pytest.approx(-0.325, rel=1e-14)
    assert SignAware(keep=1.0).tensor("w", models, vector(1)).item() == 1.0
    # With majority 0.4 the 2.6 of 5.3, which is 0.49, suffice
    assert SignAware(keep=1.0, majority=0.4).tensor("w", models, vector(1)).item() == pytest.approx(-0.325, rel=1e-14)


def test_weights_vote():
    """As above with weight 2 for the first: mean −(5.2 + 2.7)/5 = −1.58; it holds 5.2 of 7.9."""
    models = [vector(1 + tau) for tau in (-2.6, -0.9, -0.9, -0.9)]
    found = SignAware(keep=1.0, weights=(2, 1, 1, 1)).tensor("w", models, vector(1))
    assert found.item() == pytest.approx(1 - 1.58, rel=1e-14)


def test_negative_bases_are_guarded_alike():
    models = [vector(1 + tau) for tau in (-2.6, -0.9, -0.9, -0.9)]
    assert SignAware(keep=1.0).tensor("w", [-model for model in models], vector(-1)).item() == -1.0


def test_large_factors_cannot_flip_what_nobody_flipped():
    models = [vector(0.5), vector(0.6)]
    assert SignAware(keep=1.0, scale=4.0).tensor("w", models, vector(1)).item() == 1.0
    assert Ties(keep=1.0, scale=4.0).tensor("w", models, vector(1)).item() < 0


def test_zero_bases_have_no_sign_to_guard():
    models = [vector(-2.0), vector(-4.0)]
    assert SignAware(keep=1.0).tensor("w", models, vector(0)).item() == -3.0


def test_no_sign_ever_flips_without_the_majority():
    """Law, on random numbers: against the base, flips are where the majority asks, and elsewhere TIES is untouched."""
    base = torch.randn(500, generator=stream(0, "test-sign-aware"), dtype=torch.float64)
    models = [
        base + torch.randn(500, generator=stream(0, "test-sign-aware", at), dtype=torch.float64) for at in range(5)
    ]
    found, ties = SignAware(keep=0.5).tensor("w", models, base), Ties(keep=0.5).tensor("w", models, base)
    asked = majority_flips(base, [model - base for model in models], [1.0] * 5)
    refused = (ties * base < 0) & ~asked
    assert refused.sum() > 0
    assert not bool(((found * base < 0) & ~asked).any())
    torch.testing.assert_close(found[~refused], ties[~refused], rtol=0, atol=0)
    torch.testing.assert_close(found[refused], base[refused], rtol=0, atol=0)


@pytest.mark.parametrize("majority", [1.0, -0.1, float("nan")])
def test_majorities_out_of_range_are_refused(majority: float):
    refused("majority: got", SignAware, majority=majority)


def test_missing_base_and_strange_shares_are_refused():
    refused("base at 'w': got none", SignAware().tensor, "w", [vector(1)])
    refused("keep: got 0", SignAware, keep=0)
