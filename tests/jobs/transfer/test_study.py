"""Claims on runs: each is taken once, given back when lost, and a half-written claim does no harm."""

from __future__ import annotations

import math

import pytest

from sparing.errors import UserError
from sparing.jobs.transfer.settings import Cell
from sparing.jobs.transfer.study import Study

pytest.importorskip("optuna")

CELLS = [Cell("sp", 32, 1.0, x, 0) for x in (-8.0, -7.0)]
RESULT = {"loss": 1.5, "diverged": False}


def opened(path, *, fresh=False, storage=None):
    return Study(path, "study", storage=storage, fresh=fresh)


def test_two_workers_get_different_runs_and_then_none(tmp_path):
    with opened(tmp_path) as one, opened(tmp_path) as two:
        first, second = one.claim(CELLS), two.claim(CELLS)
        assert [first[0], second[0]] == CELLS
        assert one.claim(CELLS) is None
        assert one.free_dead_() == 0  # both live
        one.finish(first[1], RESULT)
        assert two.results(CELLS) == {CELLS[0]: RESULT}
        assert two.under_way == 1


def test_what_is_released_or_lost_is_claimed_again(tmp_path):
    with opened(tmp_path) as one:
        one.release_(one.claim(CELLS)[1])
        assert one.claim(CELLS)[0] == CELLS[0]
        one._own.close()  # as when the process dies: its lock is free, its file stays
        with opened(tmp_path) as two:
            assert two.claim(CELLS)[0] == CELLS[1]
            assert two.free_dead_() == 1
            assert two.claim(CELLS)[0] == CELLS[0]


def test_runs_of_other_machines_are_left_alone_unless_told(tmp_path):
    with opened(tmp_path) as one:
        one.claim(CELLS)
        (tmp_path / "workers" / one.worker).unlink()
        with opened(tmp_path) as two:
            assert two.free_dead_() == 0
            assert two.free_dead_(all_of_them=True) == 1


def test_a_claim_that_was_cut_short_is_no_second_run(tmp_path):
    with opened(tmp_path) as study:
        study._study.enqueue_trial(CELLS[0].params)
        assert study.claim(CELLS)[0] == CELLS[0]
        assert study.claim(CELLS)[0] == CELLS[1]
        assert study.claim(CELLS) is None


def test_divergence_has_an_infinite_value(tmp_path):
    with opened(tmp_path) as study:
        study.finish(study.claim(CELLS)[1], {"loss": None, "diverged": True})
        (trial,) = study._trials("COMPLETE")
        assert trial.value == math.inf


def test_a_shared_database_is_not_joined_by_accident(tmp_path):
    url = f"sqlite:///{tmp_path}/shared.db"
    opened(tmp_path, storage=url)
    opened(tmp_path, storage=url)
    with pytest.raises(UserError, match="--resume"):
        opened(tmp_path, storage=url, fresh=True)
