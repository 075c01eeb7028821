"""Sharding with layer sampling and with masks: the ranks draw alike, and the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from oracles import composition_ranks as ranks
from oracles.processes import answers

# slow: five processes import transformers
pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLANS = {"lisa": ["NNN", "IIG", "GGG"], "masked": ["IIG", "GGG"]}
BLOCK = sum(p.numel() for p in zoo.llama(layers=1).model.layers[0].parameters())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of four ranks for all tests."""
    return answers(4, ranks.asked, PLANS, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def lisa() -> tuple[list[tuple[int, ...]], dict[str, torch.Tensor]]:
    return ranks.lisa_alone()


@pytest.mark.parametrize("plan", PLANS["lisa"])
def test_every_rank_draws_the_blocks_that_one_process_draws(found, lisa, plan: str) -> None:
    assert all(rank[plan]["drawn"] == lisa[0] for rank in found)


@pytest.mark.parametrize("plan", PLANS["lisa"])
def test_a_sampled_run_ends_where_one_process_does(found, lisa, plan: str) -> None:
    """Six AdamW steps on sums of four rows in another order."""
    assert max(ranks.apart(rank[plan]["weights"], lisa[1]) for rank in found) < 1e-9


@pytest.mark.parametrize("plan", PLANS["lisa"])
def test_frozen_blocks_send_only_what_their_forward_pass_needs(found, plan: str) -> None:
    """One of four equal blocks trains. Where nobody holds another's weights, a quarter of the bytes is sent."""
    for rank in found:
        one, four = rank[plan]["sent"][1], rank[f"all {plan}"]
        if plan == "NNN":
            assert 4 * one == four
        else:
            assert one < four


@pytest.mark.parametrize(("plan", "owners"), [("NNN", 1), ("IIG", 4), ("GGG", 4)])
def test_state_of_a_thawed_block_lands_on_its_owners(found, plan: str, owners: int) -> None:
    """Two moments for each element of the block, each on one of its owners; the last owner holds padding too."""
    for rank in found:
        assert rank[plan]["moments"] == [2 * ranks.share(BLOCK, owners)] * ranks.STEPS


@pytest.mark.parametrize("plan", PLANS["masked"])
def test_masks_are_those_of_rank_0_and_travel_with_the_weights(found, plan: str) -> None:
    """Every rank was given another seed, and the second half of the run begins from a checkpoint of another plan."""
    one = ranks.masked_alone()
    for rank in found:
        whole = rank[f"masked {plan}"]
        masks = [name for name in one if name.endswith("mask")]
        assert masks
        assert all(torch.equal(whole[name], one[name]) for name in masks)
        assert ranks.apart(whole, one) < 1e-8  # six AdamW steps; a mask of another seed is off by 1


@pytest.mark.parametrize("plan", PLANS["masked"])
def test_masked_weights_are_zero_after_training_over_ranks(found, plan: str) -> None:
    one = ranks.masked_alone()
    zeros = {name: value == 0 for name, value in one.items() if value.is_floating_point()}
    assert sum(int(zero.sum()) for zero in zeros.values()) > 10_000
    for rank in found:
        assert all(torch.equal(rank[f"masked {plan}"][name] == 0, zero) for name, zero in zeros.items())
