"""Hugging Face models as they are: tied heads, grouped queries, adapters, both kinds of checkpointing, generation."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import model_ranks

# slow: imports transformers once and forks four ranks
pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLANS = {"gpt2": ("IIG", "NNG"), "llama": ("GGG", "ING")}
HOWS = ("", "kept", "reentrant")
ASKED = {f"{kind} {plan} {how}": (kind, plan, how) for kind, plans in PLANS.items() for plan in plans for how in HOWS}
ASKED |= {f"lora {plan} {how}": ("lora", plan, how) for plan, how in (("IIG", ""), ("GGG", "kept"))}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return model_ranks.answers(4, model_ranks.all_of, (2, 2), ASKED)


def test_weights_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """Rounding of float64, divided by √v of AdamW twice."""
    assert {name: a["apart"] for rank in found for name, a in rank.items() if a["apart"] > 1e-10} == {}


@pytest.mark.parametrize("what", ["rates", "generated", "unreadable while freed", "tied", "shapes"])
def test_the_rest_of_the_model_works(found: list[dict[str, Any]], what: str) -> None:
    assert [name for rank in found for name, a in rank.items() if not a[what]] == []


def test_checkpointing_sends_nothing_more(found: list[dict[str, Any]]) -> None:
    for kind, plans in PLANS.items():
        for plan in plans:
            assert len({found[0][f"{kind} {plan} {how}"]["sent"] for how in HOWS}) == 1, (kind, plan)
