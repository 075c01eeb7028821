"""What the engine sends and holds is what the formulas say, to the byte, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracles import engine_ranks as ranks_of
from oracles.engine_ranks import FROZEN, PLANS
from oracles.processes import answers

# slow: four and six processes that train briefly some hundred and fifty times
pytestmark = [pytest.mark.processes, pytest.mark.slow]

NARROW = {"dtype": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "checkpointing, no prefetch": {"checkpointing": True, "prefetch": 0},
    "bfloat16": NARROW,
    "bfloat16 on the wire": NARROW | {"reduce_dtype": torch.bfloat16},
}
LIVE = [("all", torch.float64, 1), ("some", torch.bfloat16, 0)]
MORE = [("all", torch.bfloat16, 2), ("one", torch.float64, 1)]
CORNERS = ["NNN", "NIG", "IIG", "GGG"]
"""Plans for what does not depend on all three letters."""


def live(plan: str) -> list[tuple[str, torch.dtype, int]]:
    return LIVE + MORE if plan in CORNERS else LIVE


def questions() -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for plan in PLANS:
        asked |= {f"{plan} sends, {f} trains": (ranks_of.traffic, (plan, f, {})) for f in FROZEN}
        asked |= {f"{plan} holds {case}": (ranks_of.memory, (plan, *case)) for case in live(plan)}
    for plan in CORNERS:
        asked |= {f"{plan} sends, {n}": (ranks_of.traffic, (plan, "some", o)) for n, o in OPTIONS.items()}
    return asked


@pytest.fixture(scope="module")
def square() -> list[dict[str, Any]]:
    return answers(4, ranks_of.asked, (2, 2), questions())


def wrong(found: list[dict[str, Any]], of: str, key: str, expected: str) -> dict[str, Any]:
    asked = {name: rank[name] for rank in found for name in rank if of in name}
    assert asked
    return {name: (a[key], a[expected]) for name, a in asked.items() if a[key] != a[expected]}


def test_rings_count_what_the_formulas_say(square: list[dict[str, Any]]) -> None:
    assert wrong(square, " sends", "found", "expected") == {}


def test_on_groups_of_two_times_three_ranks() -> None:
    asked = {f"{plan} sends": (ranks_of.traffic, (plan, "some", {})) for plan in PLANS}
    assert wrong(answers(6, ranks_of.asked, (3, 2), asked), " sends", "found", "expected") == {}


def test_slices_are_as_long_as_the_formulas_say(square: list[dict[str, Any]]) -> None:
    """Storages of stores, accumulators, masters and moments, after the last backward pass."""
    assert wrong(square, " holds", "loaded", "live") == {}


def test_nothing_else_is_alive_between_steps(square: list[dict[str, Any]]) -> None:
    """Every floating tensor that Python knows."""
    assert wrong(square, " holds", "rest", "rest expected") == {}


def test_peak_of_whole_tensors_is_the_formula(square: list[dict[str, Any]]) -> None:
    """A buffer in flight may be free before the next begins, so the peak is at most the formula; without it, equal."""
    over = {n: a for rank in square for n, a in rank.items() if "holds" in n and a["peak"] > a["peak expected"]}
    assert over == {}
    sure = {n: a for n, a in square[0].items() if "holds" in n and not a["grads"]}
    assert sure
    assert {n: a for n, a in sure.items() if a["peak"] != a["peak expected"]} == {}


def test_whole_blocks_are_those_in_use_and_fetched(square: list[dict[str, Any]]) -> None:
    for plan in PLANS:
        for case in live(plan):
            found = square[0][f"{plan} holds {case}"]["blocks"]
            assert found == (0 if plan[0] == "N" else min(3, 1 + case[2])), (plan, case)
