"""The whole job through ``run``: what it leaves on the disk, how it stops, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.checkpoint import saved
from sparing.jobs.pretrain import DivergedError, Pretrain, StoppedError, job, run, show, state, tables
from sparing.jobs.step import SpoiltError
from sparing.report import Record


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "time_layer", lambda d_in, d_out, density, tokens: (d_in * 1e-6, d_out * 1e-6))


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page where it is not the subject."""
    monkeypatch.setattr(job, "write_page", lambda record, path, caveats: path.write_text(record.question))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def test_what_a_run_leaves(settings: Pretrain, capsys: pytest.CaptureFixture[str]):
    from transformers import pipeline

    settings = replace(settings, save_every=2, dynamic="rigl")
    record = run(settings)
    names = {"run.json", "run.toml", "record.jsonl", "report.html", "model", "checkpoints"}
    assert {path.name for path in settings.out.iterdir()} == names
    assert [path.name for path in saved(settings.out / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert [row["step"] for row in record.table("held_out")] == [0, 3, 6]
    assert [row["step"] for row in record.table("density")] == [0, 4, 6]
    assert len(record.table("train")) == 6
    assert {len(record.table(name)) for name in ("test", "speed", "samples")} == {1}
    assert len(record.table("layers")) == 14
    assert record.table("held_out")[-1]["loss"] < record.table("held_out")[0]["loss"]
    assert Record.read(settings.out / "record.jsonl").rows == record.rows
    assert str(settings.out) not in (settings.out / "record.jsonl").read_text(encoding="utf-8")
    assert "Plan: SμPar" in capsys.readouterr().err

    write = pipeline("text-generation", model=str(settings.out / "model"), device="cpu")
    assert write("Once", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("Once")

    show(record)
    out = capsys.readouterr().out
    assert "Held-out loss" in out
    assert "optimizer state" in out
    assert Path(out.splitlines()[-1].removeprefix("report: ")).is_file()


@pytest.mark.parametrize(
    ("kind", "number"),
    [({}, signal.SIGINT), ({"backend": "csr"}, signal.SIGTERM), ({"dynamic": "rigl"}, signal.SIGINT)],
    ids=["dense", "csr", "rigl"],
)
@pytest.mark.usefixtures("brisk")
def test_killed_in_a_step_and_resumed_it_ends_in_the_same_bits(
    settings: Pretrain, same: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, kind: dict, number: int
):
    settings = replace(settings, **kind)
    straight = run(replace(settings, out=settings.out.with_name("straight")))
    calls, whole = 0, state.summed_loss

    def killing(*arguments):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), number)
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(state, "summed_loss", killing)
        with pytest.raises(StoppedError, match=r"step 3 of 6 is saved in .*step-00000003; .*--resume"):
            run(settings)
    assert not (settings.out / "model").exists()
    half = Record.read(settings.out / "record.jsonl")
    assert len(half.table("train")) == 3
    record = run(replace(settings, resume=True))
    assert same(weights(settings.out), weights(settings.out.with_name("straight")))
    columns = ("step", "loss", "lr", "grad_norm")
    rows = [[[row[c] for c in columns] for row in r.table("train")] for r in (straight, record)]
    assert rows[0] == rows[1]
    for table in ("plan", "rates", "layers", "test", "controls", "samples", "density"):
        assert record.table(table) == straight.table(table), table


@pytest.mark.usefixtures("brisk")
def test_a_finished_run_can_be_exported_again(settings: Pretrain, same: Callable[..., bool]):
    first = run(settings)
    before = weights(settings.out)
    (settings.out / "model" / "model.safetensors").unlink()
    again = run(replace(settings, resume=True, samples=3))
    assert same(weights(settings.out), before)
    assert again.table("test") == first.table("test")


@pytest.mark.usefixtures("brisk")
def test_a_run_is_not_resumed_with_other_settings_or_text(settings: Pretrain, tmp_path: Path):
    run(replace(settings, steps=2))
    with pytest.raises(UserError, match=r"resume: got density \(1/2 before, now 0.5\)"):
        run(replace(settings, steps=2, resume=True, density=0.5))
    with pytest.raises(UserError, match=r"out: got .*; it holds another run"):
        run(replace(settings, steps=2))
    path = Path(settings.data[0])
    other = tmp_path / "other.txt"
    other.write_text(path.read_text(encoding="utf-8").replace("cat", "cow"), encoding="utf-8")
    with pytest.raises(UserError, match=r"resume: got text \(other content\)"):
        run(replace(settings, steps=2, resume=True, data=(str(other),)))


@pytest.mark.usefixtures("brisk")
def test_nothing_is_written_when_something_cannot_work(settings: Pretrain):
    for changes, words in (
        ({"data": ("nowhere.txt",)}, "data: got nowhere.txt"),
        ({"tokenizer": "nowhere"}, "tokenizer: got nowhere"),
        ({"density": "1/8"}, "density: got fewer than 4 live inputs"),
        ({"density": "*.nothing=1/2"}, "density: got "),
        ({"base_width": 9}, "base: got width 9"),
        ({"model_config": Path("nowhere")}, "model_config: got nowhere"),
    ):
        with pytest.raises(UserError) as caught:
            run(replace(settings, **changes))
        assert str(caught.value).startswith(words)
        assert not settings.out.exists()


@pytest.mark.usefixtures("brisk")
def test_a_loss_that_is_no_number_leaves_the_state_before_it(settings: Pretrain, monkeypatch: pytest.MonkeyPatch):
    calls, whole = 0, state.summed_loss

    def spoiling(*arguments):
        nonlocal calls
        calls += 1
        return whole(*arguments) * (torch.nan if calls == 3 else 1)

    monkeypatch.setattr(state, "summed_loss", spoiling)
    with pytest.raises(DivergedError, match=r"step 3: loss nan.*step-00000002; start anew with --lr 0\.002"):
        run(settings)
    assert [path.name for path in saved(settings.out / "checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.usefixtures("brisk")
def test_weights_that_a_step_has_spoilt_are_not_saved(settings: Pretrain, steps: int):
    """In the last step, which no loss follows, and before, where the next loss is no number."""
    settings = replace(settings, steps=steps, lr=1e38, warmup=0, clip=0.0, evaluate_every=0)
    with pytest.raises(SpoiltError, match=r"step 1 spoilt the weights: .* is nan .*; no model is saved; start anew"):
        run(settings)
    assert sorted(path.name for path in settings.out.iterdir()) == ["record.jsonl", "run.json", "run.toml"]
    assert len(Record.read(settings.out / "record.jsonl").table("train")) == 1


@pytest.mark.usefixtures("brisk")
def test_a_damaged_checkpoint_is_refused(settings: Pretrain):
    run(settings)
    path = saved(settings.out / "checkpoints")[-1] / "tree.json"
    path.write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(UserError, match=r"checkpoint: got step-00000006: tree\.json changed"):
        run(replace(settings, resume=True))


@pytest.mark.asset
@pytest.mark.slow
def test_a_hundred_steps_on_a_real_book_learn_its_words(tmp_path: Path):
    """Untrained 6.9 nat/token; letters and common words are learnt within a hundred steps: below 5.5."""
    settings = Pretrain(out=tmp_path / "out", data=("alice",), width=64, base_width=32, layers=2, steps=100, warmup=10)
    record = run(replace(settings, batch=8, length=64, evaluate_every=0))
    held = record.table("held_out")
    assert held[-1]["loss"] < 5.5 < 6.5 < held[0]["loss"]
    assert record.table("test")[0]["bits_per_byte"] < 3.5
