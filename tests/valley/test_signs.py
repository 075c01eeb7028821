"""Signs: the conventions at zero, alignment by hand, and the three measures of agreement."""

from __future__ import annotations

import math

import pytest
import torch

from sparing.seeds import stream
from sparing.valley.directions.elements import centred, set_signs, sgp, sign, sign_alignment, special_direction

THETA = torch.tensor([[2.0, -1.0, 0.0], [4.0, 0.5, -0.5]])


def key():
    return stream(0, "turn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_sign_of_zero_is_minus_one_and_sgp_of_zero_is_zero(dtype):
    x = torch.tensor([-3.0, -0.0, 0.0, 1e-30], dtype=dtype)
    assert sign(x).tolist() == [-1, -1, -1, 1]
    assert sgp(x).tolist() == [0, 0, 0, 1]
    assert sign(x).dtype == sgp(x).dtype == dtype


def test_the_six_special_directions_by_hand():
    """The mean of the tensor is 5/6, so the entry 0.5 lies below it."""
    initial = torch.arange(6.0).view(2, 3)
    found = {kind: special_direction(kind, THETA, initial=None) for kind in ("self", "sign", "positive")}
    assert torch.equal(special_direction("initial", THETA, initial=initial), initial)
    assert torch.equal(found["self"], THETA)
    assert found["sign"].tolist() == [[1, -1, -1], [1, 1, -1]]
    assert found["positive"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert special_direction("centred-sign", THETA, initial=None).tolist() == [[1, -1, -1], [1, -1, -1]]
    assert special_direction("centred-positive", THETA, initial=None).tolist() == [[1, 0, 0], [1, 0, 0]]


def test_masked_weights_do_not_count_in_the_mean():
    theta = torch.tensor([3.0, 1.0, 0.0, 0.0])
    live = torch.tensor([True, True, False, False])
    assert centred(theta, live)[:2].tolist() == [1.0, -1.0]
    assert centred(theta)[:2].tolist() == [2.0, 0.0]


def test_the_mean_is_taken_in_float64():
    """The mean of these bfloat16 neighbours lies between them: rounded to bfloat16 it would be one of them."""
    theta = torch.tensor([1.0, 1.0, 1 + 2.0**-7], dtype=torch.bfloat16)
    torch.testing.assert_close(centred(theta), torch.tensor([-1, -1, 2], dtype=torch.float64) * 2.0**-7 / 3)


def test_consistent_by_hand():
    epsilon = torch.tensor([[-1.0, 2.0, 3.0], [4.0, 0.0, -6.0]])
    assert set_signs(epsilon, THETA, "consistent", key()).tolist() == [[1, -2, -3], [4, 0, -6]]
    assert set_signs(epsilon, THETA, "raw", key()) is epsilon


@pytest.mark.parametrize("signs", ["raw", "consistent", 0.0, 0.4, 1.0])
def test_every_sign_setting_keeps_every_magnitude(signs):
    epsilon, theta = (torch.randn(500, generator=stream(0, name)) for name in ("e", "t"))
    assert torch.equal(set_signs(epsilon, theta, signs, key()).abs(), epsilon.abs())


def test_a_ratio_turns_its_share_and_small_ratios_lie_in_large_ones():
    """Against weights of the opposite sign every chosen element shows: the count is binomial."""
    count = 50_000
    epsilon = torch.randn(count, generator=stream(0, "e"))
    before: torch.Tensor | None = None
    for ratio in (0.1, 0.3, 0.8):
        turned = set_signs(epsilon, -epsilon, ratio, key()) != epsilon
        error = math.sqrt(ratio * (1 - ratio) / count)
        assert abs(turned.double().mean().item() - ratio) <= 5 * error  # five binomial standard errors
        assert before is None or not (before & ~turned).any()
        before = turned


def test_the_choice_does_not_look_at_the_noise():
    """Turned and other elements have the same mean magnitude, within five standard errors of the difference."""
    epsilon = torch.randn(50_000, generator=stream(0, "e"))
    turned = set_signs(epsilon, -epsilon, 0.5, key()) != epsilon
    one, other = epsilon.abs()[turned].double(), epsilon.abs()[~turned].double()
    error = math.sqrt(one.var().item() / one.numel() + other.var().item() / other.numel())
    assert abs((one.mean() - other.mean()).item()) <= 5 * error


def test_the_three_measures_by_hand():
    """Votes: +·+, −·+, +·+ of |εθ| = 2, 3, 5; the zeros of either side vote for nobody."""
    direction = {"a": torch.tensor([2.0, -3.0, 0.0]), "b": torch.tensor([7.0, 1.0])}
    theta = {"b": torch.tensor([0.0, 5.0]), "a": torch.tensor([1.0, 1.0, 9.0])}
    found = sign_alignment(direction, theta)
    assert found.plain == 2 / 3
    assert found.weighted == pytest.approx(0.7, abs=1e-15)
    assert found.cosine == pytest.approx(4 / math.sqrt(63 * 108), abs=1e-15)


def test_the_measures_are_blind_to_length_and_turn_with_the_direction():
    direction = {"w": torch.randn(300, generator=stream(0, "d"), dtype=torch.float64)}
    theta = {"w": torch.randn(300, generator=stream(0, "t"), dtype=torch.float64)}
    one = sign_alignment(direction, theta)
    assert sign_alignment({"w": 1e-9 * direction["w"]}, theta) == pytest.approx(one, rel=1e-12)
    back = sign_alignment({"w": -direction["w"]}, theta)
    assert back == pytest.approx((1 - one.plain, 1 - one.weighted, -one.cosine), rel=1e-12)


def test_weights_themselves_agree_wholly_and_nothing_is_nan():
    assert sign_alignment({"w": THETA}, {"w": THETA}) == pytest.approx((1, 1, 1), abs=1e-12)
    assert all(math.isnan(value) for value in sign_alignment({"w": torch.zeros(2)}, {"w": torch.ones(2)}))


def test_the_ratios_zero_and_one_are_raw_and_consistent():
    epsilon, theta = (torch.randn(500, generator=stream(0, name)) for name in ("e", "t"))
    assert torch.equal(set_signs(epsilon, theta, 0.0, key()), epsilon)
    assert torch.equal(set_signs(epsilon, theta, 1.0, key()), set_signs(epsilon, theta, "consistent", key()))
