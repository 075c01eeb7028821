"""Models behind torch's ``parallelize_module`` end where one process does, or are refused in a line on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import tensor_parallel_ranks
from oracles.processes import answers
from oracles.tensor_parallel_ranks import CLIPS, PLANS, WAYS

# slow: four processes that train a small net some twenty times
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-12
REFUSED = {
    "whole rows": "UserError: plan: got NNN, which cuts over 1 of 2 ranks",
    "two groups": "UserError: plan: got IIG, which cuts over 1 of 2 ranks",
    "our own engine": "pass engine='fsdp2' and make_mesh(within=mesh[\"dp\"], tensor=mesh[\"tp\"])",
    "a mesh without tensor=": "pass make_mesh(within=mesh[\"dp\"], tensor=mesh[\"tp\"])",
    "another type": "UserError: dtype: got torch.float32, with tensor parallelism",
    "main memory": "UserError: offload: got cpu, with tensor parallelism",
    "our own checkpoint": "save engine.state_dict() by torch.distributed.checkpoint",
    "norms that went apart": "RunError: replicas differ: parameter layers.0.norm.weight on rank ",
}  # fmt: skip
"""What is done -> what is said."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(4, tensor_parallel_ranks.everything, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", [*PLANS, *CLIPS])
def test_training_ends_where_one_process_does(found: list[dict[str, Any]], plan: str, way: str) -> None:
    """Weights, and norms in which what all ranks have counts once; clipped."""
    assert max(rank[f"{plan} {way}"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("case", ["IIG tensor", "NIG sequence"])
def test_a_checkpoint_by_name_goes_on(found: list[dict[str, Any]], case: str) -> None:
    assert max(rank[f"dcp {case}"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("case", ["IIG tensor", "NIG sequence"])
def test_whole_weights_are_loaded_and_changed(found: list[dict[str, Any]], case: str) -> None:
    assert [rank[f"weights {case}"] for rank in found] == [0.0] * 4


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line_on_every_rank(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert REFUSED[name] in rank[name]
        assert "\n" not in rank[name]
