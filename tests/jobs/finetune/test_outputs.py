"""Whose directory it is: nothing of another run is touched, resuming means the same run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.finetune import Finetune, outputs
from sparing.jobs.finetune.checkpoint import save
from sparing.jobs.finetune.settings import Lisa, Lora


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_identity_is_that_of_what_is_learnt(settings: Finetune, data_file: Path) -> None:
    first = outputs.identity(settings)
    for harmless in (
        {"out": Path("x")},
        {"save_every": 3},
        {"evaluate_every": 2},
        {"resume": True},
        {"overwrite": True},
    ):
        assert outputs.identity(replace(settings, **harmless)) == first
    assert outputs.identity(replace(settings, lora=Lora(rank=2))) == first  # not the method in use
    for telling in ({"seed": 1}, {"lr": 0.1}, {"lisa": Lisa(period=3)}, {"method": "full"}, {"length": 9}):
        assert outputs.differences(first, outputs.identity(replace(settings, **telling))), telling
    json.dumps(first)
    data_file.write_text('{"text": "other"}\n')
    assert outputs.differences(first, outputs.identity(settings)) == ["data (other content)"]


def test_the_same_file_elsewhere_is_the_same(settings: Finetune, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(settings.data.read_bytes())
    assert outputs.identity(replace(settings, data=moved)) == outputs.identity(settings)


def test_another_run_is_left_alone(settings: Finetune) -> None:
    outputs.check_out(settings)
    outputs.claim_(settings, outputs.identity(settings))
    (settings.out / "model").mkdir()
    (settings.out / "model" / "weights").write_text("w")
    before = contents(settings.out)
    with pytest.raises(UserError, match=r"another run \(run.json, model\).*--resume.*--overwrite"):
        outputs.check_out(settings)
    assert contents(settings.out) == before


def test_overwriting_deletes_only_what_a_run_writes(settings: Finetune) -> None:
    outputs.claim_(settings, outputs.identity(settings))
    (settings.out / "checkpoints").mkdir()
    (settings.out / "checkpoints" / "x").write_text("x")
    (settings.out / "notes.txt").write_text("mine")
    anew = replace(settings, overwrite=True)
    outputs.check_out(anew)
    outputs.claim_(anew, outputs.identity(anew))
    assert set(contents(settings.out)) == {"run.json", "notes.txt"}


def test_what_no_run_wrote_is_not_overwritten(settings: Finetune) -> None:
    """A directory called model beside a person's own files is theirs."""
    (settings.out / "model").mkdir(parents=True)
    with pytest.raises(UserError, match="no run wrote its model"):
        outputs.check_out(replace(settings, overwrite=True))


def test_a_run_does_not_delete_what_it_reads(settings: Finetune) -> None:
    outputs.claim_(settings, outputs.identity(settings))
    (settings.out / "model").mkdir()
    with pytest.raises(UserError, match="reads from what it would delete"):
        outputs.check_out(replace(settings, overwrite=True, model=settings.out / "model"))


def test_a_file_is_no_directory(settings: Finetune) -> None:
    settings.out.write_text("")
    with pytest.raises(UserError, match="not a directory"):
        outputs.check_out(settings)


def test_there_must_be_something_to_resume(settings: Finetune) -> None:
    with pytest.raises(UserError, match="no run was started"):
        outputs.check_out(replace(settings, resume=True))


def test_resuming_with_other_settings_names_them(settings: Finetune) -> None:
    outputs.claim_(settings, outputs.identity(settings))
    for changes, said in (
        ({"lr": 0.5}, r"lr \(None before, now 0.5\)"),
        ({"lisa": Lisa(active=1, period=3)}, r"lisa.active \(2 before, now 1\), lisa.period \(20 before, now 3\)"),
        ({"method": "full"}, r"method \(lisa before, now full\)"),
    ):
        other = replace(settings, resume=True, **changes)
        with pytest.raises(UserError, match=said):
            outputs.latest(other, outputs.identity(other))


def test_the_newest_checkpoint_is_taken(settings: Finetune) -> None:
    outputs.claim_(settings, outputs.identity(settings))
    again = replace(settings, resume=True)
    assert outputs.latest(again, outputs.identity(again)) is None
    for step in (2, 10):
        save(settings.out / "checkpoints", step, {"step": step})
    assert outputs.latest(again, outputs.identity(again)) == {"step": 10}
    assert outputs.latest(settings, outputs.identity(settings)) is None
    (settings.out / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json is broken"):
        outputs.latest(again, outputs.identity(settings))
