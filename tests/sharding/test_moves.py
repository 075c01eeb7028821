"""Another plan in the middle of training changes nothing, to the bit; blocks that freeze and thaw train as in torch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from oracles import engine_ranks, engine_trouble
from oracles.engine_ranks import PLANS
from oracles.processes import answers
from sparing.errors import UserError
from sparing.sharding.engine.moves import plans_by_block
from sparing.sharding.levels import Plan

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SHUFFLED = random.Random(1).sample(PLANS, len(PLANS))
CHAINS = {"coarse to fine": PLANS, "fine to coarse": PLANS[::-1], "shuffled": SHUFFLED}
MIXED = ["NNN", {"blocks.1": "GGG", "embed": "IIG"}, {"blocks.1": "NIG", "blocks.2": Plan("ING")}, "III"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    asked: dict[str, Any] = {f"chain {name}": (engine_ranks.chained, (chain,)) for name, chain in CHAINS.items()}
    asked["chain mixed"] = (engine_ranks.chained, (MIXED,))
    asked["curved"] = (engine_ranks.curved, (SHUFFLED,))
    asked |= {f"freezing {plan}": (engine_trouble.moving, (plan,)) for plan in PLANS}
    return answers(4, engine_ranks.asked, (2, 2), asked)


@pytest.mark.parametrize("chain", [*CHAINS, "mixed"])
@pytest.mark.parametrize("what", ["weights", "momenta", "moved", "exact"])
def test_a_chain_of_plans_ends_in_the_bits_of_one_process(found: list[dict[str, Any]], chain: str, what: str) -> None:
    assert all(rank[f"chain {chain}"][what] for rank in found)


def test_moments_and_groups_of_adamw_move_too(found: list[dict[str, Any]]) -> None:
    """Fourteen AdamW steps on sums in another order."""
    assert max(rank["curved"] for rank in found) < 1e-9


def test_a_moving_set_trains_as_in_one_process(found: list[dict[str, Any]]) -> None:
    """State begins again when a block thaws; ten AdamW steps."""
    assert {plan: a for rank in found for plan in PLANS if (a := rank[f"freezing {plan}"]["apart"]) > 1e-10} == {}


@pytest.mark.parametrize("what", ["bytes", "held"])
def test_frozen_blocks_send_and_hold_what_the_formulas_say(found: list[dict[str, Any]], what: str) -> None:
    assert [plan for rank in found for plan in PLANS if not all(rank[f"freezing {plan}"][what])] == []


def test_nothing_to_train_is_refused_and_harmless(found: list[dict[str, Any]]) -> None:
    told = {rank[f"freezing {plan}"]["refused"] for rank in found for plan in PLANS}
    assert len(told) == 1
    assert "nothing that it depends on trains" in told.pop()


def test_a_plan_for_no_block_is_refused() -> None:
    with pytest.raises(UserError, match=r"blocks\.9"):
        plans_by_block([], {"blocks.9": Plan("IIG")})
