"""Forward passes that are not one walk through all blocks still train as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import engine_ranks, flow_ranks
from oracles.flow_ranks import WAYS
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLANS = ["NNN", "IIG", "GGG", "GNG"]
WHOLE = ["NNN", "NIG"]
UNDER = dict.fromkeys(WAYS, PLANS) | {"whole, twice": ["NNI", "NIG"]}
"""Of each way, where nothing is refused."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    asked: dict[str, Any] = {f"{way} {plan}": (flow_ranks.trained, (way, plan)) for way in WAYS for plan in UNDER[way]}
    asked |= {f"carried {plan}": (flow_ranks.carried, (plan,)) for plan in PLANS}
    looks = [("all", plan) for plan in PLANS] + [("one", plan) for plan in WHOLE]
    asked |= {f"evaluated {who} {plan}": (flow_ranks.looked_at_in_full, (plan, who)) for who, plan in looks}
    asked |= {f"stale {plan}": (flow_ranks.stale, (plan,)) for plan in PLANS}
    asked |= {f"elsewhere {plan}": (flow_ranks.stale_elsewhere, (plan,)) for plan in WHOLE}
    return answers(4, engine_ranks.asked, (2, 2), asked)


@pytest.mark.parametrize("way", WAYS)
def test_unusual_forward_passes_train_as_in_one_process(found: list[dict[str, Any]], way: str) -> None:
    assert {plan: a for rank in found for plan in UNDER[way] if not (a := rank[f"{way} {plan}"]) < 1e-10} == {}


@pytest.mark.parametrize("plan", PLANS)
def test_weights_go_out_and_into_another_plan(found: list[dict[str, Any]], plan: str) -> None:
    told = [rank[f"carried {plan}"] for rank in found]
    assert [(rank, what) for rank, a in enumerate(told) for what, right in a.items() if not right] == []


def test_evaluations_between_passes_change_no_step(found: list[dict[str, Any]]) -> None:
    """Stochastic depth with all blocks in between, and where nothing need be gathered on the first rank alone."""
    told = [(key, far) for rank in found for key, far in rank.items() if key.startswith("evaluated")]
    assert len(told) == 6 * 4
    assert [(key, far) for key, far in told if not far < 1e-10] == []


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_older_than_the_weights_is_refused_as_by_torch(found: list[dict[str, Any]], plan: str) -> None:
    for told in (rank[f"stale {plan}"] for rank in found):
        assert "has been modified by an inplace operation" in told["step"]
        assert "has been modified by an inplace operation" in told["load"]
        assert told["and on"]


def test_a_loss_older_than_a_step_that_changed_nothing_it_saved_trains_on(found: list[dict[str, Any]]) -> None:
    assert [far for rank in found for plan in WHOLE if not (far := rank[f"elsewhere {plan}"]) < 1e-10] == []
