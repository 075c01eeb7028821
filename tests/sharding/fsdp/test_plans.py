"""All plans on ``fully_shard`` end in the bits of our engine where sums are exact, else where one process does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oracles import fsdp_ranks
from oracles.processes import answers
from oracles.sharded import Case
from sparing.sharding import Clip, effective

# slow: four processes, forked from one that has imported torch
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

PLANS = [plan.name for plan in effective()]
EXACT: dict[str, dict[str, Any]] = {
    "frozen, unused, groups, uneven accumulation": {
        "frozen": True, "unused": True, "groups": True, "accumulate": 3, "uneven": True,
    },
    "tied, checkpointing": {"tied": True, "checkpointing": True, "steps": 1},  # two steps need over 53 bits
    "twice, no prefetch": {"twice": True, "prefetch": 0, "accumulate": 2},
}  # fmt: skip
CURVED: dict[str, dict[str, Any]] = {
    "AdamW, clipped, all of it": {
        "optimizer": "adamw", "clip": 0.05, "accumulate": 3, "frozen": True, "tied": True, "checkpointing": True,
        "groups": True, "uneven": True, "steps": 3,
    },
    "each parameter clipped": {"clip": Clip(0.002, math.inf, each=True), "accumulate": 2, "tied": True, "early": True},
}  # fmt: skip
CASES = {f"{plan} {name}": Case(plan=plan, **more) for plan in PLANS for name, more in EXACT.items()} | {
    f"{plan} {name}": Case(plan=plan, exact=False, **more) for plan in PLANS for name, more in CURVED.items()
}
CORNERS = ["NIG", "ING", "IIG", "IGG", "GIG", "GGG"]
"""Plans where rows are cut twice, or over both axes."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return answers(4, fsdp_ranks.matrix, CASES, (2, 2))


def wrong(found: list[dict[str, Any]], key: str, *, exact: bool) -> list[str]:
    return [
        f"{n}, rank {r}" for r, rank in enumerate(found) for n in rank if CASES[n].exact >= exact and not rank[n][key]
    ]


def test_exact_sums_end_in_the_bits_of_our_engine(found: list[dict[str, Any]]) -> None:
    assert wrong(found, "bits of ours", exact=True) == []


def test_exact_sums_end_in_the_bits_of_one_process(found: list[dict[str, Any]]) -> None:
    assert wrong(found, "equal", exact=True) == []


def test_the_steps_moved_the_weights_under_their_names(found: list[dict[str, Any]]) -> None:
    assert wrong(found, "moved", exact=False) == wrong(found, "names", exact=False) == []


@pytest.mark.parametrize(("key", "limit"), [("apart", 1e-12), ("norms", 1e-12)])
def test_real_numbers_agree_to_rounding(found: list[dict[str, Any]], key: str, limit: float) -> None:
    """Sums in another order: rounding of 1e-16, which AdamW's division by √v grows a thousandfold."""
    assert {name: rank[name][key] for rank in found for name in rank if rank[name][key] > limit} == {}


def test_on_groups_of_three_and_of_one() -> None:
    """Rows that six ranks do not share evenly; axes of one rank, over which torch calls no reduce-scatter."""
    for sizes, plans in (((3, 2), CORNERS), ((1, 3), ["III", "IIG", "GIG"]), ((3, 1), ["NIG", "IIG"])):
        cases = {plan: Case(plan=plan, accumulate=2) for plan in plans}
        for rank in answers(sizes[0] * sizes[1], fsdp_ranks.matrix, cases, sizes):
            assert [name for name in rank if not (rank[name]["bits of ours"] and rank[name]["equal"])] == [], sizes
