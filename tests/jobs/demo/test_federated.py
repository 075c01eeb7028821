"""The demo's sixth chapter: what it asks of `sparing federate`, and doing without Flower."""

from __future__ import annotations

import pytest

from sparing.jobs.demo import federated as module
from sparing.jobs.demo.federated import run_chapter, settings_of
from sparing.jobs.federate import job
from sparing.report import Record


def test_without_flower_its_run_is_left_out(small, tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(job, "run", lambda settings: Record(question="", settings=settings, seed=0, environment={}))
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=small.federate)
    assert not record.table("federated_flower")


@pytest.mark.parametrize("run", ["main", "blocks"])
def test_an_interrupted_run_is_resumed_only_when_asked(small, tmp_path, run):
    """Starting over with another seed in the same folder deletes what is there; nobody's folder is touched else."""
    (tmp_path / "federated" / run / "checkpoints").mkdir(parents=True)
    over = settings_of(run, small.federate, 0, tmp_path)
    on = settings_of(run, small.federate, 0, tmp_path, resume=True)
    fresh = settings_of(run, small.federate, 0, tmp_path / "other", resume=True)
    assert [(each.resume, each.overwrite) for each in (over, on, fresh)] == [
        (False, True),
        (True, False),
        (False, False),
    ]
