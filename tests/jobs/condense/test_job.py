"""The whole job: its files, going on to the same bits, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.condense import Condense, StoppedError, loop, run, show
from sparing.jobs.condense import job as module
from sparing.jobs.condense.methods import TITLES
from sparing.jobs.condense.settings import Evaluation
from sparing.report import Record


def test_it_leaves_images_record_and_page(small, capsys) -> None:
    record = run(dataclasses.replace(small, per_class=2, compare=True))
    out = small.out
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "images.png", "images.safetensors", "record.jsonl", "report.html", "run.json", "run.toml",
    ]  # fmt: skip
    saved = load_file(out / "images.safetensors")
    assert saved["images"].shape == (4, 1, 16, 16)
    assert saved["labels"].tolist() == [0, 0, 1, 1]
    assert {"step-00000000", "step-00000002", "step-00000004"} <= set(saved)
    assert torch.equal(saved["step-00000004"], saved["images"])
    assert (out / "images.png").read_bytes()[:4] == b"\x89PNG"
    written = Record.read(out / "record.jsonl")
    assert written.rows == record.rows
    assert set(written.tables) == {"length", "memory", "curve", "train", "methods", "control", "nets"}
    assert str(out) not in (out / "record.jsonl").read_text()
    mark = json.loads((out / "run.json").read_text())
    assert mark["width"] == 4
    assert {name.partition(".")[0] for name in mark} < {field.name for field in dataclasses.fields(Condense)}
    held = {row["method"]: row["peak"] for row in record.table("memory")}
    assert set(held) == set(TITLES.values()) - {"two-phase"}
    page = (out / "report.html").read_text()
    assert "width 4 (paper 128)" in page
    show(record)
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {out / 'report.html'}"


@pytest.fixture
def unseen(monkeypatch) -> None:
    """No pictures: drawing them takes longer than the runs."""
    monkeypatch.setattr(module, "write_page", lambda *_: None)
    monkeypatch.setattr(module, "gallery", lambda *_, **__: SimpleNamespace(save_png=lambda path: path.touch()))


@pytest.mark.usefixtures("unseen")
def test_a_run_that_is_killed_while_it_is_judged_does_not_take_its_steps_again(small, monkeypatch) -> None:
    small = dataclasses.replace(small, save_every=0)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # a look on the way judges by one net, the end by several
        patch.setattr(loop, "accuracies", lambda *_, nets, **__: [0.0] if nets == 1 else killed())
        with pytest.raises(KeyboardInterrupt):
            run(small)
    monkeypatch.setattr(loop, "take_step_", killed)
    assert run(dataclasses.replace(small, resume=True)).table("methods")[0]["steps"] == small.steps


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("method", ["forward-gradient", "two-phase"])
def test_an_interrupted_run_goes_on_to_the_same_bits(small, tmp_path, monkeypatch, method: str) -> None:
    # shortened in every other step or so, so that the median must be the same, too
    small = dataclasses.replace(small, clip_medians=1.0)
    whole = dataclasses.replace(small, out=tmp_path / "whole", method=method)
    expected = [row for row in run(whole).rows if row["table"] == "train"]
    broken = dataclasses.replace(small, method=method, save_every=0)
    step = loop.take_step_

    def interrupted(state):
        row = step(state)
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(loop, "take_step_", interrupted)
    with pytest.raises(StoppedError, match="outer step 2 of 4 is saved"):
        run(broken)
    monkeypatch.setattr(loop, "take_step_", step)
    found = [row for row in run(dataclasses.replace(broken, resume=True)).rows if row["table"] == "train"]
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in (found, expected)]
    assert timeless[0] == timeless[1]
    one, other = (load_file(path / "images.safetensors") for path in (small.out, whole.out))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.usefixtures("unseen")
def test_a_resumed_run_measures_what_it_is_asked_to_compare(small, monkeypatch) -> None:
    monkeypatch.setattr(module, "bytes_of_a_step", lambda state, method: 0)
    small = dataclasses.replace(small, steps=1, measurements=1, evaluation=Evaluation(steps=1, nets=1))
    before = run(small).table("memory")
    again = run(dataclasses.replace(small, resume=True, compare=True)).table("memory")
    assert again[:1] == before
    methods = [row["method"] for row in again]
    assert len(methods) == len(set(methods))
    assert set(methods) == set(TITLES.values()) - {"two-phase"}


@pytest.mark.usefixtures("unseen")
def test_a_finished_run_is_not_overwritten_unasked(small) -> None:
    run(small)
    with pytest.raises(UserError, match="holds another run"):
        run(small)
    before = (small.out / "images.safetensors").read_bytes()
    run(dataclasses.replace(small, overwrite=True))
    assert (small.out / "images.safetensors").read_bytes() == before


@pytest.mark.usefixtures("unseen")
def test_only_the_same_run_can_be_resumed(small, tmp_path) -> None:
    with pytest.raises(UserError, match="no run was started there"):
        run(dataclasses.replace(small, resume=True))
    run(small)
    with pytest.raises(UserError, match="outer_lr"):
        run(dataclasses.replace(small, resume=True, outer_lr=0.2))
    (small.out / "run.json").write_text("{")
    with pytest.raises(UserError, match="broken"):
        run(dataclasses.replace(small, resume=True))


def test_a_foreign_directory_is_left_alone(small) -> None:
    small.out.mkdir()
    (small.out / "images.png").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"no run wrote its images\.png"):
        run(dataclasses.replace(small, overwrite=True))
    assert (small.out / "images.png").read_bytes() == b"mine"
