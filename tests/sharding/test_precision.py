"""Sixteen-bit parameters with masters of thirty-two, against a single process that does so by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracles import engine_ranks, engine_trouble
from oracles.engine_ranks import PLANS
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    asked: dict[str, Any] = {f"mixed {plan}": (engine_trouble.mixed, (plan, None, None)) for plan in PLANS}
    asked["mixed and scaled"] = (engine_trouble.mixed, ("IIG", torch.float32, 256.0))
    asked |= {f"wired {plan}": (engine_trouble.wired, (plan,)) for plan in PLANS}
    asked |= {f"narrow {plan}": (engine_trouble.without_masters, (plan,)) for plan in ("NIG", "GGG")}
    asked |= {f"overflow {plan}": (engine_trouble.overflowing, (plan,)) for plan in ("NNN", "III", "NIG", "GGG")}
    return answers(4, engine_ranks.asked, (2, 2), asked)


def those(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {f"{name}, rank {r}": a for r, rank in enumerate(found) for name, a in rank.items() if name.startswith(kind)}


@pytest.mark.parametrize("what", ["parameters", "masters", "kept"])
def test_masters_keep_what_sixteen_bits_cannot(found: list[dict[str, Any]], what: str) -> None:
    assert [name for name, a in those(found, "mixed").items() if not a[what]] == []


def test_formats_are_those_asked_for(found: list[dict[str, Any]]) -> None:
    assert all(a["formats"] == {"torch.bfloat16", "torch.float32"} for a in those(found, "mixed").values())


def test_gradients_travel_in_the_format_asked_for(found: list[dict[str, Any]]) -> None:
    """In bfloat16 whole numbers up to 256 arrive as they are, and 257 arrives as 256."""
    assert {name: a for name, a in those(found, "wired").items() if a != {"small": True, "step": [256.0]}} == {}


def test_without_masters_everything_has_sixteen_bits(found: list[dict[str, Any]]) -> None:
    assert all(a == {"equal": True, "master": 0} for a in those(found, "narrow").values())


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(found: list[dict[str, Any]]) -> None:
    for a in those(found, "overflow").values():
        assert a["unchanged"]
        assert a["norms"][0] == "nan"
        assert a["skipped"] == 1


def test_the_step_after_an_overflow_is_ordinary(found: list[dict[str, Any]]) -> None:
    told = those(found, "overflow").values()
    assert all(a["finite"] and a["then moved"] for a in told)
    norms = [float(a["norms"][1]) for a in told]
    assert max(norms) / min(norms) - 1 < 1e-5  # float32 sums in another order under other plans
