"""Stages of a pipeline under plans end where one process does, or are refused in a line on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import pipeline_ranks
from oracles.pipeline_ranks import CASES
from oracles.processes import answers

# slow: four processes that train a small net some forty times
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-12
REFUSED = {
    "no schedule inside": "pipeline: got no gradients of a schedule",
    "two schedules inside": "pipeline: got schedule.step twice",
    "one too many": "pipeline: got call 2 since the last step",
    "engine.backward before it": "schedule: got one after engine.backward in a step",
    "several stages a rank": "schedule: got ScheduleInterleaved1F1B",
    "a stage of another model": "schedule: got a stage of another FSDPPart",
    "engine.pipeline of our own engine": "engine: got sparing, with Schedule1F1B",
    "a loss scale": "loss_scale: got 8.0, in stages",
    "another limit in each stage": "settings of the stages: got clip 1.0 on rank",
    "a limit that one stage has changed": "step of the whole model: got clip Clip(max_norm=1.0",
    "one folder": "in two stages; a checkpoint is of one stage's ranks",
    "one name": "state_dict: got ['blocks.0.first.bias'] in two stages",
    "stages unknown": "schedule: got 2 stages, the mesh 1",
    "a mesh of two dimensions": "within: got a device mesh [[0, 1, 2, 3]] on rank",
    "stages among the ranks": "stages: got ranks [0, 1, 2, 3] beside",
} | {f"{plan} sparing": "for a schedule pass engine='fsdp2'" for plan in ("NNN", "IIG", "GGG")} | {
    f"{plan} fsdp2": "run a schedule in engine.pipeline" for plan in ("NNN", "IIG", "GGG")
}  # fmt: skip
"""What is done -> what is said."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(4, pipeline_ranks.everything, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("name", CASES)
def test_schedules_end_where_one_process_does(found: list[dict[str, Any]], name: str) -> None:
    """Weights, and the norm over all stages."""
    assert max(rank[name] for rank in found) <= ROUNDING


@pytest.mark.parametrize("engine", ["sparing", "fsdp2"])
@pytest.mark.parametrize("plan", ["NNG", "III"])
def test_who_sends_activations_by_hand_has_either_engine(found: list[dict[str, Any]], plan: str, engine: str) -> None:
    assert max(rank[f"by hand {plan} {engine}"] for rank in found) <= ROUNDING


@pytest.mark.parametrize("way", ["own", "dcp"])
def test_stages_resume_from_their_folders_or_from_one_by_names(found: list[dict[str, Any]], way: str) -> None:
    assert max(rank[way] for rank in found) <= ROUNDING


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line_on_every_rank(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert rank[name].startswith("UserError: ")
        assert REFUSED[name] in rank[name]
        assert "\n" not in rank[name]
