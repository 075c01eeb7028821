"""Replicas that differ, and ranks that left the order of collectives, are found and named."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import engine_ranks, engine_trouble
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SPOILT = [("III", "store"), ("NIG", "store"), ("INI", "master"), ("NNN", "store"), ("GGG", "log")]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    asked: dict[str, Any] = {f"spoilt {a} {b}": (engine_trouble.corrupted, (a, b)) for a, b in SPOILT}
    asked |= {f"raising {plan}": (engine_trouble.raising, (plan,)) for plan in ("IIG", "GGG")}
    asked |= {f"retried {plan}": (engine_trouble.retried, (plan,)) for plan in ("NNN", "NIG")}
    asked["disagreeing"] = (engine_trouble.disagreeing, ())
    asked |= {f"misused {plan}": (engine_trouble.misused, (plan,)) for plan in ("IIG", "NNI")}
    return answers(4, engine_ranks.asked, (2, 2), asked)


@pytest.mark.parametrize(("plan", "what"), [case for case in SPOILT if case[1] != "log"])
def test_a_changed_bit_names_tensor_and_rank(found: list[dict[str, Any]], plan: str, what: str) -> None:
    """Where a rank holds the only copy there is nothing to compare; the plans here have copies."""
    told = {rank[f"spoilt {plan} {what}"]["told"] for rank in found}
    assert len(told) == 1
    words = told.pop()
    assert "RunError: replicas differ" in words
    assert "blocks.2/trainable" in words
    assert "rank 3" in words or plan == "INI"  # of two copies nobody knows which is the wrong one


def test_a_rank_that_left_the_order_is_named(found: list[dict[str, Any]]) -> None:
    told = {rank["spoilt GGG log"]["told"] for rank in found}
    assert len(told) == 1
    assert "collectives" in (words := told.pop())
    assert "on ranks 0, 1, 2" in words


@pytest.mark.parametrize("plan", ["IIG", "GGG"])
def test_a_step_that_raised_on_all_ranks_can_be_abandoned(found: list[dict[str, Any]], plan: str) -> None:
    for rank in found:
        told = rank[f"raising {plan}"]
        assert told["tripped"]
        assert "engine.abandon()" in told["again"]
        assert told["equal"]


@pytest.mark.parametrize("plan", ["IIG", "GGG"])
def test_ranks_that_left_at_different_places_are_told_to_restart(found: list[dict[str, Any]], plan: str) -> None:
    assert all("on rank 1" in rank[f"raising {plan}"]["alone"] for rank in found)


@pytest.mark.parametrize("plan", ["NNN", "NIG"])
def test_a_rank_that_nobody_waits_for_may_try_again(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"retried {plan}"] for rank in found)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seeds", "head.weight"), ("plan", "IGG"), ("rate", "'lr': 1.1"), ("code", "torch"), ("freeze", "blocks.1"),
        ("set_plan", "NNN"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_named(found: list[dict[str, Any]], what: str, words: str) -> None:
    told = {rank["disagreeing"][what] for rank in found}
    assert len(told) == 1
    assert words in (line := told.pop())
    assert "on ranks 0, 2, 3" in line
    assert "on rank 1" in line


MISUSES = {
    "step without any": "0 backward passes", "step too early": "a step has 2", "set_plan inside": "call step() first",
    "freeze inside": "call step() first", "gathered inside": "a step is under way", "backward too often": "call 3",
    "unknown block": "blocks.9", "unknown plan block": "blocks.9", "backward while gathered": "gathered()",
    "sharded twice": "sharded already", "added": "spare.weight", "closed": "backward: got closed",
}  # fmt: skip


@pytest.mark.parametrize("plan", ["IIG", "NNI"])
def test_calls_at_wrong_times_are_refused(found: list[dict[str, Any]], plan: str) -> None:
    for rank in found:
        told = rank[f"misused {plan}"]
        assert {name: told[name] for name, words in MISUSES.items() if words not in told[name]} == {}


@pytest.mark.parametrize("plan", ["IIG", "NNI"])
def test_refused_calls_leave_the_engine_unharmed(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"misused {plan}"]["unharmed"] == "True" for rank in found)
