"""Weights written where no slice keeps them, and calls at times when they would spoil the model, are refused."""

from __future__ import annotations

import pytest

from oracles import misuse_ranks
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_weights_written_in_a_forward_pass_are_refused_where_they_would_be_lost() -> None:
    """And the engine goes on: a step after an edit inside gathered() is that of one process."""
    for told in answers(2, misuse_ranks.asked, misuse_ranks.written):
        assert "got weights written while they were whole for a pass; only a slice is kept" in told["refused"]
        assert told["kept"]
        assert told["apart"] <= 1e-15


def test_weights_written_in_a_forward_pass_stay_where_every_rank_has_all() -> None:
    assert max(answers(2, misuse_ranks.asked, misuse_ranks.whole)) <= 1e-15


@pytest.mark.parametrize("engine", ["sparing", "fsdp2"])
def test_a_closed_engine_leaves_the_model_alone_and_no_weights_are_loaded_inside_a_step(engine: str) -> None:
    for told in answers(2, misuse_ranks.asked, misuse_ranks.ended, engine):
        words = "load_full_state_dict_: got after 1 micro-steps; gradients of a step under way are of other weights"
        assert told.pop("inside a step").startswith(words)
        assert told.pop("free", True)
        assert len(told) == (7 if engine == "sparing" else 3)
        assert all(line.startswith(f"{what}: got a closed engine;") for what, line in told.items())
