"""What makes two runs the same, and what a run may not delete; the rest is the folder's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparing.errors import UserError
from sparing.jobs.finetune import Finetune
from sparing.jobs.finetune.job import resume, run_of
from sparing.jobs.finetune.settings import Lisa
from sparing.jobs.folder import differences
from sparing.jobs.lm.adapters import Lora
from sparing.report import Record


def empty() -> Record:
    return Record(question="", settings={}, seed=0, environment={})


def identity(settings: Finetune) -> dict[str, Any]:
    run = run_of(settings)
    resume(run, empty())
    return run.mark


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out")


def test_the_identity_is_that_of_what_is_learnt(settings: Finetune, data_file: Path) -> None:
    first = identity(settings)
    for harmless in (
        {"out": Path("x")},
        {"save_every": 3},
        {"evaluate_every": 2},
        {"overwrite": True},
    ):
        assert identity(replace(settings, **harmless)) == first
    assert identity(replace(settings, lora=Lora(rank=2))) == first  # not the method in use
    for telling in ({"seed": 1}, {"lr": 0.1}, {"lisa": Lisa(period=3)}, {"method": "full"}, {"length": 9}):
        assert differences(first, identity(replace(settings, **telling))), telling
    assert json.loads(json.dumps(first)) == first
    data_file.write_text('{"text": "other"}\n')
    assert differences(first, identity(settings), files={"data"}) == ["data (other content)"]


def test_the_same_file_elsewhere_is_the_same(settings: Finetune, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(settings.data[0].read_bytes())
    assert identity(replace(settings, data=moved)) == identity(settings)


def test_resuming_with_other_settings_names_them(settings: Finetune) -> None:
    run_of(settings).folder.claim_(identity(settings))
    for changes, said in (
        ({"lr": 0.5}, r"lr \(None before, now 0.5\)"),
        ({"lisa": Lisa(active=1, period=3)}, r"lisa.active \(2 before, now 1\), lisa.period \(20 before, now 3\)"),
        ({"method": "full"}, r"method \(lisa before, now full\)"),
    ):
        other = replace(settings, resume=True, **changes)
        with pytest.raises(UserError, match=said):
            identity(other)


def test_a_run_does_not_delete_what_it_reads(settings: Finetune) -> None:
    run_of(settings).folder.claim_(identity(settings))
    (settings.out / "model").mkdir()
    with pytest.raises(UserError, match="reads from what it would delete"):
        run_of(replace(settings, overwrite=True, model=settings.out / "model")).folder.check()
