"""All plans train as one process does: to the bit where sums are exact, else to the rounding of float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oracles import sharded
from oracles.processes import answers
from oracles.sharded import Case
from sparing.sharding import Clip, effective

# slow: up to six processes, forked from one that has imported torch; a shape of ranks costs about ten seconds
pytestmark = [pytest.mark.processes, pytest.mark.slow]

SHAPES = {
    "2x2": (2, 2), "2x3": (3, 2), "3x2": (2, 3), "one group": (3, 1), "groups of one": (1, 3),
    "alone": (1, 1),
}  # fmt: skip
"""Ranks of a group, groups."""
PLANS = [plan.name for plan in effective()]
FEATURES: dict[str, dict[str, Any]] = {
    "frozen, unused, groups, accumulating": {"frozen": True, "unused": True, "groups": True, "accumulate": 3},
    "tied, checkpointing": {"tied": True, "checkpointing": True, "steps": 1},  # longer: two steps need over 53 bits
    "twice, no prefetch": {"twice": True, "prefetch": 0, "accumulate": 2},
}
ELSEWHERE: dict[str, dict[str, Any]] = {"plain": {"prefetch": 3}, "accumulating": {"accumulate": 3, "steps": 1}}
CURVED: dict[str, dict[str, Any]] = {
    "clipped, frozen, tied, checkpointing, groups": {
        "clip": 0.05, "accumulate": 3, "frozen": True, "tied": True, "checkpointing": True, "groups": True,
    },
    "each parameter clipped by its largest entry": {
        "clip": Clip(0.002, math.inf, each=True), "frozen": True, "tied": True,
    },
    "clipped by the sum of magnitudes, ended early": {
        "clip": Clip(0.05, 1), "groups": True, "accumulate": 2, "early": True,
    },
}  # fmt: skip
"""Real numbers, AdamW."""


def cases(shape: str) -> dict[str, Case]:
    """Everything on 2×2; elsewhere accumulation of one and three, and of one only where an axis has one rank."""
    features = FEATURES if shape == "2x2" else ELSEWHERE
    if min(SHAPES[shape]) == 1:
        features = {"plain": ELSEWHERE["plain"]}
    found = {f"{plan} {name}": Case(plan=plan, **more) for plan in PLANS for name, more in features.items()}
    curved = {"exact": False, "optimizer": "adamw", "steps": 3}
    for plan in PLANS:
        if shape == "2x2":
            found |= {f"{plan} {name}": Case(plan=plan, **curved, **more) for name, more in CURVED.items()}
        elif plan in ("NNN", "IIG"):
            found[f"{plan} curved"] = Case(plan=plan, **curved)
    mixed = {"blocks.1": "NNN", "head/trainable": "GGG", "embed": "NIG"}
    found["mixed plans"] = Case(plan="IIG", plans=mixed, accumulate=2)
    return found


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    inner, outer = SHAPES[request.param]
    return request.param, answers(inner * outer, sharded.matrix, cases(request.param), (inner, outer))


def wrong(ranks: tuple[str, list[dict[str, Any]]], key: str, kind: str) -> list[str]:
    shape, found = ranks
    chosen = [name for name, case in cases(shape).items() if case.exact or kind == "all"]
    return [f"{name}, rank {rank}" for name in chosen for rank, answer in enumerate(found) if not answer[name][key]]


def test_every_exact_sum_ends_in_the_bits_of_one_process(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    assert wrong(ranks, "equal", "exact") == []


def test_the_steps_moved_the_weights(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    assert wrong(ranks, "moved", "all") == []


def test_names_are_those_of_the_model(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    assert wrong(ranks, "names", "all") == []


def test_a_closed_engine_leaves_the_same_weights_behind(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    assert wrong(ranks, "closed", "all") == []


def test_real_numbers_agree_to_rounding(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    """Three AdamW steps on sums in another order: rounding of 1e-16 grows to about 1e-13 through the division by √v."""
    _, found = ranks
    far = {name: answer[name]["apart"] for answer in found for name in answer if answer[name]["apart"] > 1e-10}
    assert far == {}


def test_norms_are_those_of_one_process(ranks: tuple[str, list[dict[str, Any]]]) -> None:
    """Relative; sums of a hundred squares in another order."""
    _, found = ranks
    assert {name: answer[name]["norms"] for answer in found for name in answer if answer[name]["norms"] > 1e-12} == {}
