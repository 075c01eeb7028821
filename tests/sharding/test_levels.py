"""The rule keeps 14 of 27 plans and 30 of 64; every refusal names the nearest legal plan."""

from __future__ import annotations

import re
from itertools import product

import pytest

from sparing.errors import UserError
from sparing.sharding.levels import LETTERS, Plan, effective, eliminated, letters, level_of

KEPT = ["NNN", "NNI", "NII", "INI", "III", "NNG", "NIG", "NGG", "ING", "IIG", "IGG", "GNG", "GIG", "GGG"]
"""The paper's fourteen, as its text lists them."""

DROPPED = ["INN", "NIN", "IIN", "GNN", "NGN", "GGN", "GIN", "IGN", "GNI", "NGI", "GGI", "GII", "IGI"]


def beaten(name: str, tiers: int) -> bool:
    """Whether the plan with a finer optimizer state moves no more and holds less: the reason behind the rule."""
    p, g, os = (level_of(letter, tiers) for letter in name)
    return any(os < level <= max(p, g) for level in range(tiers + 1))


def test_fourteen_of_twentyseven():
    assert sorted(plan.name for plan in effective()) == sorted(KEPT)
    assert sorted(eliminated()) == sorted(DROPPED)
    assert len(effective()) == 14
    assert len(eliminated()) == 13


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_number_kept_is_a_sum_of_squares(tiers: int):
    assert len(effective(tiers)) == sum((level + 1) ** 2 for level in range(tiers + 1))
    assert len(effective(tiers)) + len(eliminated(tiers)) == (tiers + 1) ** 3


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_kept_are_those_that_no_finer_optimizer_beats(tiers: int):
    names = ["".join(three) for three in product(letters(tiers), repeat=3)]
    assert {name for name in names if not beaten(name, tiers)} == {plan.name for plan in effective(tiers)}


def test_levels_are_indices():
    assert Plan("NIG").levels() == (0, 1, 2)
    assert Plan("NIG").levels(3) == (0, 1, 3)
    assert Plan("IMG").levels(3) == (1, 2, 3)
    assert Plan("NGG").levels(1) == (0, 1, 1)
    assert [level_of(letter, 3) for letter in LETTERS] == list(range(4))
    assert all(letters(tiers)[level_of(letter, tiers)] == letter for tiers in (1, 2, 3) for letter in letters(tiers))


@pytest.mark.parametrize("name", DROPPED)
def test_a_broken_rule_says_which_why_and_what_instead(name: str):
    with pytest.raises(UserError, match=rf"got {name}; .*coarser than (parameters|gradients)") as raised:
        Plan(name)
    instead = re.search(r"write (\w+)$", str(raised.value))
    assert instead is not None
    assert instead[1] in KEPT
    assert instead[1][:2] == name[:2]


@pytest.mark.parametrize("name", ["", "II", "IIGG", "ABC", "0 1", "N-G"])
def test_three_letters_of_four(name: str):
    with pytest.raises(UserError, match="three of the letters"):
        Plan(name)


def test_small_letters_are_pointed_at():
    with pytest.raises(UserError, match="write IIG"):
        Plan("iig")


def test_the_middle_tier_needs_three():
    assert Plan("MMG").levels(3) == (2, 2, 3)
    with pytest.raises(UserError, match="level: got M; a machine of 2 tiers has the levels N, I, G"):
        Plan("MMG").levels(2)
    with pytest.raises(UserError, match="tiers"):
        effective(4)


def test_names_of_others():
    assert [Plan(name).known_as for name in ("NNN", "NNG", "NGG", "ING")] == ["DDP", "ZeRO-1", "ZeRO-2", None]


def test_the_cause_is_named():
    with pytest.raises(UserError, match="optimizer state at N is coarser than gradients at I"):
        Plan("NIN")
    with pytest.raises(UserError, match=r"optimizer state at I is coarser than parameters at G.*write GIG"):
        Plan("GII")
