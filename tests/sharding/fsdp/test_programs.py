"""Models on ``fully_shard`` do what torch's users do: checkpoints by name both ways, meta device, compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import fsdp_programs
from oracles.fsdp_programs import PLANS
from oracles.processes import answers

# slow: four processes that train a small net some sixty times
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-12
"""Four AdamW steps on sums in another order: rounding of 1e-16, which the division by √v grows."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return answers(4, fsdp_programs.everything)


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_goes_to_a_torch_program_and_back(found: list[dict[str, Any]], plan: str) -> None:
    """Weights in the same bits; with the moments, training ends where one process does."""
    for rank in found:
        told = rank[f"both ways {plan}"]
        assert told["handed"] == 0.0
        assert told["apart"] <= ROUNDING


def test_a_checkpoint_from_before_the_first_step_counts_no_step(found: list[dict[str, Any]]) -> None:
    assert max(rank["before a step"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("what", ["meta IIG", "meta NNG", "segments III", "segments GIG", "segments NIG"])
def test_meta_device_and_segments_of_checkpointing(found: list[dict[str, Any]], what: str) -> None:
    assert max(rank[what] for rank in found) <= ROUNDING


@pytest.mark.parametrize("plan", ["IIG", "NIG"])
def test_compiled_blocks(found: list[dict[str, Any]], plan: str) -> None:
    """One graph for each block: hooks stay outside."""
    for rank in found:
        assert rank[f"compiled {plan}"]["apart"] <= ROUNDING
        assert rank[f"compiled {plan}"]["graphs"] == 2


@pytest.mark.parametrize("plan", ["NNN", "NIG", "ING", "IIG", "GIG"])
def test_bfloat16_with_masters_has_the_bits_of_our_engine(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"narrow {plan}"] for rank in found)


def test_what_the_user_writes_between_steps_counts(found: list[dict[str, Any]]) -> None:
    assert all(rank["edited"] for rank in found)


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "loss.backward()": "call engine.backward(loss)",
        "clip_grad_norm_": "a look at .grad",
        "clip_grad_norm_ of whole ones": "a look at .grad",
        "optimizer.step()": "a look at .grad",
        "zero_grad": "a look at .grad",
        "model.to": "a parameter with other memory",
        "a hook": "a hook on its gradient",
        "an early exit": "return that tensor from the block",
        "step first": "0 backward passes",
        "backward twice": "call step() first",
        "thawed later": "freeze and add before shard_",
        "meta": "it holds no values yet",
        "buffer": "make it on a real device",
    }.items(),
)
def test_mistakes_in_a_loop_are_said(found: list[dict[str, Any]], mistake: str, words: str) -> None:
    assert all(words in rank["refused"][mistake] for rank in found)
