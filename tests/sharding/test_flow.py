"""Forward passes that are not one walk through all blocks still train as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import engine_ranks, flow_ranks
from oracles.flow_ranks import WAYS
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLANS = ["NNN", "IIG", "GGG", "GNG"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    asked: dict[str, Any] = {f"{way} {plan}": (flow_ranks.trained, (way, plan)) for way in WAYS for plan in PLANS}
    asked |= {f"carried {plan}": (flow_ranks.carried, (plan,)) for plan in PLANS}
    return answers(4, engine_ranks.asked, (2, 2), asked)


@pytest.mark.parametrize("way", WAYS)
def test_unusual_forward_passes_train_as_in_one_process(found: list[dict[str, Any]], way: str) -> None:
    assert {plan: a for rank in found for plan in PLANS if not (a := rank[f"{way} {plan}"]) < 1e-10} == {}


@pytest.mark.parametrize("plan", PLANS)
def test_weights_go_out_and_into_another_plan(found: list[dict[str, Any]], plan: str) -> None:
    told = [rank[f"carried {plan}"] for rank in found]
    assert [(rank, what) for rank, a in enumerate(told) for what, right in a.items() if not right] == []
