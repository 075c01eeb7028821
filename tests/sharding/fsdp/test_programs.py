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


@pytest.mark.parametrize("state", ["offload", "keep"])
def test_a_sampler_goes_on_from_each_ranks_part_of_the_state(state: str) -> None:
    for rank, told in enumerate(answers(2, fsdp_programs.on_two, state)):
        assert told["hosted"] == (state == "offload")
        assert told["same"]
        words = f"optimizer state exp_avg: got (77,); this process holds ({4 - rank},) of (7,); resume on as many"
        assert told["apart"].startswith(words)


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


@pytest.mark.parametrize("what", ["meta IIG", "meta NNG"])
def test_a_model_from_the_meta_device(found: list[dict[str, Any]], what: str) -> None:
    assert max(rank[what] for rank in found) <= ROUNDING


@pytest.mark.parametrize("plan", ["NNN", "NIG", "ING", "IIG", "GGG"])
def test_compiled_blocks(found: list[dict[str, Any]], plan: str) -> None:
    """One graph for each block: hooks stay outside."""
    for rank in found:
        assert rank[f"compiled {plan}"]["apart"] <= ROUNDING
        assert rank[f"compiled {plan}"]["graphs"] == 2


@pytest.mark.parametrize("plan", ["NNN", "NIG", "ING", "IIG", "GIG"])
def test_bfloat16_with_masters_has_the_bits_of_our_engine(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"narrow {plan}"] for rank in found)


@pytest.mark.parametrize("plan", ["NNI", "IIG", "GGG"])
def test_a_dtype_keeps_exact_masters_and_has_the_bits_of_our_engine(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"cast {plan}"] for rank in found)


@pytest.mark.parametrize("plan", ["NNG", "IIG", "GIG"])
def test_freeze_and_thaw_have_the_bits_of_our_engine(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"frozen {plan}"] for rank in found)


@pytest.mark.parametrize("plan", ["NIG", "III"])
def test_layer_sampling_ends_where_one_process_does(found: list[dict[str, Any]], plan: str) -> None:
    assert max(rank[f"sampled {plan}"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("plan", ["NNG", "IIG"])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step(found: list[dict[str, Any]], plan: str) -> None:
    for rank in found:
        told = rank[f"scaled {plan}"]
        assert told["apart"] <= ROUNDING
        assert (told["skipped"], told["moved"]) == (1, 0.0)


@pytest.mark.parametrize("plan", ["NNN", "ING", "GGG"])
def test_an_abandoned_step_leaves_nothing(found: list[dict[str, Any]], plan: str) -> None:
    """Whole gradients that torch had added up were in the next step."""
    assert max(rank[f"abandoned {plan}"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("plan", ["IIG", "NII"])
def test_weights_that_were_gathered_ahead_are_not_used_after_others_came(
    found: list[dict[str, Any]], plan: str
) -> None:
    assert max(rank[f"ahead {plan}"] for rank in found) == 0.0


def test_what_the_user_writes_between_steps_counts(found: list[dict[str, Any]]) -> None:
    assert all(rank["edited"] for rank in found)


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "clip_grad_norm_ of whole ones": "a look at .grad",
        "an exit below all outputs": "a block's output had a gradient",
        "a penalty on cut parameters": "inside of the forward pass of their block",
        "abandoned in 16 bits": "start again from a checkpoint",
        "step first": "0 backward passes",
        "backward twice": "call step() first",
        "thawed later": "that shard_ found trainable",
        "meta": "it holds no values yet",
        "buffer": "make it on a real device",
    }.items(),
)
def test_mistakes_in_a_loop_are_said(found: list[dict[str, Any]], mistake: str, words: str) -> None:
    assert all(words in rank["refused"][mistake] for rank in found)
