"""Offload, the lanes of CUDA, and models that have an engine or another parallelism already, on ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import fsdp_uses
from oracles.processes import answers

# slow: four processes that train a small net some sixty times
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return answers(4, fsdp_uses.everything)


@pytest.mark.parametrize("plan", fsdp_uses.PLANS)
def test_offload_changes_no_bit(found: list[dict[str, Any]], plan: str) -> None:
    assert all(rank[f"offloaded {plan}"] for rank in found)


def test_a_model_from_the_meta_device_is_offloaded(found: list[dict[str, Any]]) -> None:
    """Rounding of sums in another order, which AdamW's division grows."""
    assert max(rank["offloaded meta"] for rank in found) <= 1e-12


@pytest.mark.parametrize("plan", ["NNN", "NIG", "IIG", "GIG"])
def test_lanes_without_threads_and_rings_by_main_memory_have_the_same_bits(
    found: list[dict[str, Any]], plan: str
) -> None:
    """What CUDA tensors take over gloo, run on tensors of main memory."""
    assert all(rank[f"as on CUDA {plan}"] for rank in found)


def test_a_model_is_sharded_once_whatever_is_whole_just_now(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for what, line in rank["twice"].items():
            assert "sharded already" in line, what
            assert ("close its engine" if what == "a part of ours" else "into a new one") in line, what


def test_other_parallelism_is_refused_in_a_line(found: list[dict[str, Any]]) -> None:
    words = {"tensors": 'make_mesh(within=mesh["dp"], tensor=mesh["tp"])', "pipeline": "parameters: got"}
    for rank in found:
        for what, line in rank["parallel"].items():
            assert words[what.split(",")[0]] in line
            assert "\n" not in line


def test_a_limit_that_one_rank_changed_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    assert all("on rank 1" in rank["clip"] for rank in found)
