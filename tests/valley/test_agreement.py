"""Shares of equal signs against direct counts, and the chance level against all permutations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparing import vectors
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.forecast.agreement import chance_level, group_of, sign_agreement


def drawn(*shape: int, label: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(0, "test-agreement", label), dtype=torch.float64)


def permuted(a: list[float], b: list[float]) -> float:
    """Mean share of agreeing votes over all orders of b in which one pair votes at least."""
    shares = []
    for order in itertools.permutations(b):
        votes = [(x > 0) == (y > 0) for x, y in zip(a, order, strict=True) if x and y]
        if votes:
            shares.append(sum(votes) / len(votes))
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1, 2, -1, 3, -2], [1, -1, -1, -1, 2]),
        ([1, 2, -1, 0, 0], [0, 0, 1, -1, 2]),  # a voter less and the share's denominator varies with the order
        ([1, 0, 0, 0], [0, -1, 0, 2]),
        ([1, 1, 1, 1], [2, 2, 2, 2]),
    ],
)
def test_chance_level_is_the_mean_over_all_permutations(a: list[float], b: list[float]):
    """Exact up to the rounding of 120 float64 additions at most."""
    up, down = [sum(x > 0 for x in v) for v in (a, b)], [sum(x < 0 for x in v) for v in (a, b)]
    level = chance_level((up[0], down[0]), (up[1], down[1]))
    assert level == pytest.approx(permuted(a, b), rel=1e-13)
    aligned = {"w": torch.tensor(sorted(a)).double()}, {"w": torch.tensor(sorted(b)).double()}
    found = sign_agreement(*aligned)
    assert found.votes == 0 or found.chance == pytest.approx(level, rel=1e-13)


def test_hand_counted_case():
    """In w 2 of 4 agree and of the one pair that votes in b none. By chance: w ¾ · ¾ + ¼ · ¼ = ⅝, and b ½."""
    a = {"w": torch.tensor([1.0, 2.0, 3.0, -4.0]), "b": torch.tensor([1.0, 0.0])}
    b = {"w": torch.tensor([5.0, 1.0, -1.0, 2.0]), "b": torch.tensor([-1.0, 7.0])}
    found = sign_agreement(a, b)  # agree +, agree +, flip, flip in w; flip in b
    assert (found.element, found.tensor, found.votes, found.zeros) == (2 / 5, (2 / 4 + 0) / 2, 5, 1 / 6)
    chance = (4 * 5 / 8 + 1 / 2) / 5
    assert found.chance == pytest.approx(chance, rel=1e-15)
    assert found.corrected == pytest.approx((2 / 5 - chance) / (1 - chance), rel=1e-14)
    # weights |a| + |b|: 6, 3, 4, 6 and 2; the first two agree
    assert found.weighted == pytest.approx(9 / 21, rel=1e-15)


def test_weighted_share_is_the_distance_over_flips():
    a, b = {"w": drawn(50, label="a")}, {"w": drawn(50, label="b")}
    flip = a["w"].sign() != b["w"].sign()
    distance = (a["w"] - b["w"])[flip].abs().sum() / (a["w"].abs() + b["w"].abs()).sum()
    assert sign_agreement(a, b).weighted == pytest.approx(1 - float(distance), rel=1e-13)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([-2.0, 0.0, 1.0]), st.sampled_from([-1.0, 0.0, 3.0])), min_size=1))
def test_a_zero_votes_for_nobody_as_in_vectors(pairs: list[tuple[float, float]]):
    """Law: the share is that of ``sparing.vectors``, and pairs with a zero change nothing in any share."""
    a, b = ({"w": torch.tensor([pair[at] for pair in pairs])} for at in (0, 1))
    found = sign_agreement(a, b)
    assert found.element == pytest.approx(float(vectors.sign_agreement(a, b)), nan_ok=True)
    kept = [pair for pair in pairs if pair[0] and pair[1]]
    if kept:
        alone = sign_agreement(*({"w": torch.tensor([pair[at] for pair in kept])} for at in (0, 1)))
        assert (found.element, found.tensor, found.votes) == (alone.element, alone.tensor, alone.votes)
        assert found.weighted == pytest.approx(alone.weighted, rel=1e-12)  # sums in another order


def test_the_papers_zero_is_minus():
    a, b = {"w": torch.tensor([0.0, 0.0, 1.0, -1.0])}, {"w": torch.tensor([0.0, -1.0, 0.0, 0.0])}
    found = sign_agreement(a, b, zero="minus")
    assert (found.element, found.zeros, found.votes) == (3 / 4, 0.0, 4)
    nobody = sign_agreement(a, b)
    assert (nobody.votes, nobody.zeros) == (0, 1.0)
    assert all(math.isnan(share) for share in (nobody.element, nobody.chance, nobody.corrected, nobody.error))


def test_strangers_are_at_zero_and_equals_at_one():
    a, b = {"w": drawn(200, 200, label="c")}, {"w": drawn(200, 200, label="d")}
    strangers = sign_agreement(a, b)
    assert abs(strangers.corrected) < 4 * strangers.error  # a normal draw passes 4 errors once in 16,000
    assert strangers.error == pytest.approx(1 / 200, rel=1e-3)  # √(½ / (½ · 40,000)), signs being balanced within 1 %
    assert sign_agreement(a, a).corrected == 1.0


def test_positive_scales_agree_by_chance_alone():
    scale = {"bn.weight": torch.ones(8)}
    found = sign_agreement(scale, {"bn.weight": torch.full((8,), 0.2)})
    assert (found.element, found.chance) == (1.0, 1.0)
    assert math.isnan(found.corrected)


def test_gaussian_weights_follow_grothendieck():
    """For normal pairs with correlation c the share of equal signs is 1 − arccos(c) / π."""
    a, noise = drawn(400, 400, label="e"), drawn(400, 400, label="f")
    for c in (0.3, 0.9):
        found = sign_agreement({"w": a}, {"w": c * a + math.sqrt(1 - c * c) * noise})
        assert found.element == pytest.approx(1 - math.acos(c) / math.pi, abs=4 * 0.5 / 400)  # 4 binomial errors


def test_task_vectors_are_compared_where_there_is_a_base():
    base = {"w": torch.tensor([5.0, 5.0, -5.0])}
    a, b = {"w": torch.tensor([6.0, 4.0, -6.0])}, {"w": torch.tensor([7.0, 6.0, -5.5])}
    assert sign_agreement(a, b).element == 1.0
    assert sign_agreement(a, b, base=base).element == pytest.approx(2 / 3)


def test_groups_hold_their_own_shares():
    a = {"h.0.w": torch.ones(2), "h.0.b": -torch.ones(1), "h.1.w": torch.ones(3), "head": torch.ones(1)}
    b = {"h.0.w": torch.ones(2), "h.0.b": torch.ones(1), "h.1.w": -torch.ones(3), "head": torch.ones(1)}
    blocks = sign_agreement(a, b, by="block").groups
    assert {name: (one.element, one.votes) for name, one in blocks.items()} == {
        "h.0": (pytest.approx(2 / 3), 3), "h.1": (0.0, 3), "head": (1.0, 1),
    }  # fmt: skip
    assert list(sign_agreement(a, b, by="tensor").groups) == list(a)
    named = sign_agreement(a, b, by={"head": "classifier"}).groups
    assert {name: one.votes for name, one in named.items()} == {"other": 6, "classifier": 1}
    assert list(sign_agreement(a, b, by=lambda name: name[-1]).groups) == ["w", "b", "d"]


def test_group_names():
    assert group_of("layer1.0.conv1.weight", "block") == "layer1.0"
    assert group_of("0.weight", "block") == "0"
    assert group_of("conv1.weight", "block") == "conv1"
    with pytest.raises(UserError, match="unknown grouping"):
        group_of("w", "layer")  # type: ignore[arg-type]


def test_other_architectures_and_strange_zeros_are_refused():
    with pytest.raises(UserError, match="'weight'"):
        sign_agreement(nn.Linear(2, 2), nn.Linear(3, 2))
    with pytest.raises(UserError, match="abstains"):
        sign_agreement(nn.Linear(2, 2), nn.Linear(2, 2), zero="plus")  # type: ignore[arg-type]
