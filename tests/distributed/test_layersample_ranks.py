"""Two processes over gloo equal one: manual data parallelism and ``fully_shard``, with blocks frozen and thawed."""

from __future__ import annotations

import pytest
import torch

import lisa_ranks
from oracles.processes import answers
from sparing.layersample import Adaptive

# slow: two processes, once for all tests
pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCENARIOS = {
    "manual": {},
    "adaptive": {"sampler": Adaptive(temperature=0.1)},
    "misa": lisa_ranks.MISA,
    "fsdp reset": {},
    "fsdp keep": {"state": "keep"},
    "fsdp offload": {"state": "offload"},
    "fsdp truncated": {"embed": False},
    "fsdp adaptive": {"sampler": Adaptive(temperature=0.1)},
}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """One start of two processes for all tests: starting them is what costs."""
    return answers(lisa_ranks.WORLD, lisa_ranks.work)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_equal_one(ranks: list[dict], name: str) -> None:
    """Each with half of the batch; blocks exactly, weights up to the order in which eight rows are summed."""
    one = lisa_ranks.one_process(**SCENARIOS[name])
    for answer in ranks:
        assert answer[name]["history"] == one["history"]
        for parameter, values in one["weights"].items():
            # 8 AdamW steps of 1e-2 on rounding of 1e-16: seen below 1e-13, a wrong mean gives 1e-3
            torch.testing.assert_close(
                torch.tensor(answer[name]["weights"][parameter]), torch.tensor(values), rtol=0, atol=1e-10
            )


@pytest.mark.parametrize("name", [*SCENARIOS])
def test_both_processes_end_with_the_same_bits(ranks: list[dict], name: str) -> None:
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"]


def test_frozen_blocks_send_nothing(ranks: list[dict]) -> None:
    """Every step reduces exactly the elements that train: one body block and the two ends."""
    for answer in ranks:
        assert answer["manual"]["sent"] == [answer["manual"]["active"]] * lisa_ranks.STEPS


@pytest.mark.parametrize("policy", ["reset", "offload"])
def test_sharded_parameters_lose_their_state_when_they_freeze(ranks: list[dict], policy: str) -> None:
    for answer in ranks:
        assert answer[f"fsdp {policy}"]["stateful"] == answer[f"fsdp {policy}"]["trainable"]


def test_a_block_frozen_in_the_first_forward_wakes_under_mixed_precision(ranks: list[dict]) -> None:
    """pytorch issue 186998: without our refresh the backward pass raises, so the test tests something."""
    everything = {name for name, _ in lisa_ranks.Net().named_parameters()}
    for answer in ranks:
        assert answer["mixed"] == {"error": None, "moved": sorted(everything)}
        assert "grad_dtype" in answer["mixed without refresh"]["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other seeds", "every process must train the same blocks"),
        ("ddp", "DistributedDataParallel"),
        ("not averaged", "nobody averaged them"),
        ("ddp later", "nobody averaged them"),
        ("masters", "MixedPrecisionPolicy"),
        ("matrices", "freezes as a whole"),
        ("probe", "a part of every gradient"),
        ("reduce", "leave the call out"),
        ("step in backward", "several processes"),
    ],
)
def test_refusals_reach_every_process(ranks: list[dict], name: str, words: str) -> None:
    for answer in ranks:
        assert words in answer["refusals"][name]


def test_processes_that_need_not_agree_may_draw_apart(ranks: list[dict]) -> None:
    assert [answer["refusals"]["other seeds, alone"] for answer in ranks] == [None, None]


def test_a_gradient_on_one_process_counts_half_and_none_stays_none(ranks: list[dict]) -> None:
    assert [answer["uneven"] for answer in ranks] == [{"head.bias": 1.5, "nobody": True}] * 2
