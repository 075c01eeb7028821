"""The whole job through ``run``: what it leaves on the disk, and what it leaves alone."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from patience import PATIENCE
from sparing import cli
from sparing.errors import UserError
from sparing.jobs import checkpoint
from sparing.jobs.checkpoint import saved
from sparing.jobs.finetune import DivergedError, Finetune, StoppedError, job, run, show, state
from sparing.jobs.finetune.settings import Lisa
from sparing.jobs.lm.adapters import Lora
from sparing.report import Record

STEPS = 7


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    """Seven steps, in intervals of three, of a model that fits in a thimble."""
    return Finetune(
        model=model_dir,
        data=data_file,
        out=tmp_path / "out",
        length=32,
        held_out=0.3,
        steps=STEPS,
        lr=1e-2,
        accumulate=2,
        max_new_tokens=2,
        lisa=Lisa(active=1, period=3),
        lora=Lora(rank=2),
    )


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("method", ["full", "lisa", "lora"])
def test_what_a_run_leaves(settings: Finetune, method: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if method != "lisa":
        request.getfixturevalue("brisk")  # one of the three with page and ledgers is enough
    settings = replace(settings, method=method, evaluate_every=3, save_every=3)
    record = run(settings)
    names = {"run.json", "run.toml", "record.jsonl", "report.html", "model", "checkpoints"} | (
        {"adapter"} if method == "lora" else set()
    )
    assert {path.name for path in settings.out.iterdir()} == names
    assert [p.name for p in saved(settings.out / "checkpoints")] == ["step-00000006", "step-00000007"]

    model = AutoModelForCausalLM.from_pretrained(settings.out / "model")
    assert AutoTokenizer.from_pretrained(settings.out / "model")("a")["input_ids"] == [64]
    before = AutoModelForCausalLM.from_pretrained(settings.model)
    moved = {
        n for (n, a), b in zip(model.named_parameters(), before.parameters(), strict=True) if not torch.equal(a, b)
    }
    rows = {row["block"]: row["moved"] for row in record.table("movement")}
    assert {block for block, how_far in rows.items() if how_far and "layers" in str(block)} == {
        ".".join(name.split(".")[:3]) for name in moved if "layers" in name
    }
    assert [row["step"] for row in record.table("held_out")] == [0, 3, 6, 7]
    assert len(record.table("train")) == STEPS
    assert len(record.table("switches")) == (3 if method == "lisa" else 0)
    assert [bool(row["measured"]) for row in record.table("memory")] == [True] * (6 if method == "lisa" else 0)
    assert {"prompt", "before", "after"} == set(record.table("samples")[0])
    controls, ended = record.table("controls"), record.table("held_out")[-1]["loss"]
    assert [row["control"] for row in controls] == ["unigram", "bigram"]
    assert all(row["model_below"] == row["loss"] - ended for row in controls)
    assert Record.read(settings.out / "record.jsonl").rows == record.rows
    assert str(settings.out) not in (settings.out / "record.jsonl").read_text(encoding="utf-8")


@pytest.mark.usefixtures("brisk")
def test_the_adapter_and_the_merged_model_agree(settings: Finetune) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run(replace(settings, method="lora"))
    base = AutoModelForCausalLM.from_pretrained(settings.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls transformers by an old name
        adapted = PeftModel.from_pretrained(base, settings.out / "adapter").merge_and_unload()
    assert same({n: p.detach() for n, p in adapted.named_parameters()}, weights(settings.out))


@pytest.mark.usefixtures("brisk")
def test_what_show_prints(
    settings: Finetune, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(settings.out.parent)
    record = run(replace(settings, steps=2, out=Path("out")))
    record.add("memory", category="total", predicted=2**20, measured=None)
    show(record)
    out = capsys.readouterr().out
    assert "Held-out loss" in out
    assert "Memory at the peak of a step" in out
    assert out.splitlines()[-1] == "report: out/report.html"
    assert Path(out.splitlines()[-1].removeprefix("report: ")).is_file()


@pytest.mark.parametrize(
    ("method", "number"), [("full", signal.SIGINT), ("lisa", signal.SIGTERM), ("lora", signal.SIGINT)]
)
@pytest.mark.usefixtures("brisk")
def test_a_signal_finishes_the_step_and_resuming_ends_in_the_same_bits(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    """The signal comes in the middle of step 5, which is in the middle of the second interval."""
    settings = replace(settings, method=method)
    straight = run(replace(settings, out=settings.out.with_name("straight")))
    handler = signal.getsignal(number)
    calls, whole = 0, state.gradients_

    def killing(state, data):
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), number)
        return whole(state, data)

    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", killing)
        with pytest.raises(StoppedError, match=r"step 5 of 7 is saved in .*step-00000005; .*--resume"):
            run(settings)
    assert signal.getsignal(number) is handler
    assert calls == 5
    assert not (settings.out / "model").exists()

    rest = run(replace(settings, resume=True))
    assert same(weights(settings.out), weights(settings.out.with_name("straight")))
    for name in ("train", "held_out", "switches", "movement", "samples"):
        untimed = [
            [{k: v for k, v in row.items() if k != "seconds"} for row in r.table(name)] for r in (rest, straight)
        ]
        assert untimed[0] == untimed[1]


@pytest.mark.usefixtures("brisk")
def test_resuming_a_finished_run_ends_in_the_same_files(settings: Finetune) -> None:
    first = run(settings)
    before = weights(settings.out)
    shutil.rmtree(settings.out / "model")
    assert run(replace(settings, resume=True)).rows == first.rows
    assert same(before, weights(settings.out))


@pytest.mark.processes
@pytest.mark.slow  # another interpreter, which imports torch and transformers
@pytest.mark.usefixtures("brisk")
def test_a_killed_process_resumes_to_the_same_bits(settings: Finetune) -> None:
    """SIGKILL, which no program can catch, as soon as the second checkpoint is there."""
    settings = replace(settings, steps=60, save_every=2)
    straight = settings.out.with_name("straight")
    code = f"""
from pathlib import Path as {type(settings.out).__name__}
from sparing.jobs.finetune import Finetune, run
from sparing.jobs.finetune.settings import Lisa
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.optimizer import *
from sparing.jobs.settings import Local
run({settings!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    while len(saved(settings.out / "checkpoints")) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert not (settings.out / "model").exists()

    run(replace(settings, resume=True))
    run(replace(settings, out=straight))
    assert same(weights(settings.out), weights(straight))


@pytest.mark.usefixtures("brisk")
def test_a_loss_that_is_not_finite_stops_with_the_last_good_state(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, whole = replace(settings, method="full"), state.gradients_
    short = run(replace(settings, steps=4, schedule="constant", out=settings.out.with_name("short")))

    def poisoned(state, data):
        row = whole(state, data)
        return row | {"loss": torch.tensor(math.nan)} if state.step == 4 else row

    monkeypatch.setattr(state, "gradients_", poisoned)
    with pytest.raises(
        DivergedError, match=r"step 5: loss nan.*step-00000004.*sparing finetune .*model .*--lr 0.0025"
    ) as caught:
        run(replace(settings, schedule="constant"))
    assert "\n" not in str(caught.value)
    assert [p.name for p in saved(settings.out / "checkpoints")] == ["step-00000004"]
    assert same(weights(settings.out), weights(settings.out.with_name("short")))  # nothing of step 5 is in it
    assert len(Record.read(settings.out / "record.jsonl").table("train")) == len(short.table("train"))
    assert not (settings.out / "report.html").exists()


@pytest.mark.usefixtures("brisk")
def test_a_first_step_that_diverges_says_so_where_nothing_is_held_out(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of the model that is left has no loss to tell."""
    true = state.gradients_
    monkeypatch.setattr(state, "gradients_", lambda *given: true(*given) | {"loss": torch.tensor(math.nan)})
    with pytest.raises(DivergedError, match=r"step 1: loss nan.*step-00000000.*--lr 0.0025"):
        run(replace(settings, held_out=0.0))
    text = (settings.out / "model" / "README.md").read_text(encoding="utf-8")
    assert "## Training" in text
    assert "## Results" not in text


@pytest.mark.parametrize(("steps", "held_out"), [(1, 0.0), (1, 0.3), (2, 0.0)])
@pytest.mark.usefixtures("brisk")
def test_weights_that_a_step_has_spoilt_are_not_saved(
    settings: Finetune, capsys: pytest.CaptureFixture[str], steps: int, held_out: float
) -> None:
    """The loss before the step is finite, so is the gradient; a step of 1e30 then leaves weights of 1e30."""
    arguments = ["finetune", str(settings.model), str(settings.data[0]), "--out", str(settings.out), "--length", "32"]
    arguments += ["--held-out", str(held_out), "--steps", str(steps), "--lr", "1e30", "--schedule", "constant"]
    assert cli.main([*arguments, "--max-new-tokens", "0"]) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"step 1 spoilt the weights: .* is nan after it; no model is saved; .*--lr 2.5e\+29", told)
    assert sorted(path.name for path in settings.out.iterdir()) == ["record.jsonl", "run.json", "run.toml"]
    rows = Record.read(settings.out / "record.jsonl").table("held_out")
    assert [math.isnan(float(row["perplexity"])) for row in rows] == ([False, True] if held_out else [])


@pytest.mark.usefixtures("brisk")
def test_the_model_is_loaded_once(settings: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the weights moved is read from the files, a tensor at a time; a second model would double the peak."""
    from transformers import AutoModelForCausalLM

    loads, whole = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(a) or whole(*a, **k))
    rows = run(replace(settings, steps=2)).table("movement")
    assert len(loads) == 1
    before, after = load_file(settings.model / "model.safetensors"), weights(settings.out)
    for row in rows[1:-2]:
        names = [name for name in before if name.startswith(f"{row['block']}.")]
        moved, size = (
            sum(float(t.double().square().sum()) for t in tensors)
            for tensors in ([after[n] - before[n] for n in names], [before[n] for n in names])
        )
        assert row["moved"] == pytest.approx(math.sqrt(moved / size), rel=1e-6)  # float32 differences


@pytest.mark.usefixtures("brisk")
def test_a_full_disk_stops_with_the_previous_checkpoint_whole(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(replace(settings, out=settings.out.with_name("straight"), save_every=2))
    whole, calls = checkpoint.save_file, 0

    def filling(tensors, path):
        nonlocal calls
        calls += 1
        if calls == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", filling)
        with pytest.raises(UserError, match="disk is full"):
            run(replace(settings, save_every=2))
    assert [p.name for p in (settings.out / "checkpoints").iterdir()] == ["step-00000002"]
    rest = run(replace(settings, save_every=2, resume=True))
    assert same(weights(settings.out), weights(settings.out.with_name("straight")))
    assert rest.table("samples") == straight.table("samples")


def test_a_full_disk_at_the_page(settings: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job, "write_page", full)
    with pytest.raises(UserError, match="disk is full"):
        run(replace(settings, steps=2))


def missing_model(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, model=settings.out / "none")


def missing_data(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, data=settings.out / "none.jsonl")


def broken_line(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    path = write({"text": "a"})
    path.write_text(path.read_text() + "{\n")
    return replace(settings, data=path)


def too_many_blocks(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, lisa=Lisa(active=4))


def too_long(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, length=1000)


def no_such_target(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, method="lora", lora=Lora(targets="nothing_like_it"))


def warm_up_too_long(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, warmup=STEPS)


def tied_alone(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    path = settings.data[0].parent / "tied"
    zoo.llama(layers=3, vocab=258, tied=True, dtype=torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(settings.model / name, path)
    return replace(settings, model=path, lisa=Lisa(active=1, embed=False))


def without_blocks(settings: Finetune, write: Callable[..., Path]) -> Finetune:
    return replace(settings, lisa=Lisa(active=1, body="model.nowhere"))


MISTAKES = [
    missing_model, missing_data, broken_line, too_many_blocks, too_long, no_such_target, warm_up_too_long, tied_alone,
    without_blocks,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("brisk")
def test_a_mistake_is_one_line_and_nothing_is_written(
    settings: Finetune, jsonl: Callable[..., Path], mistake: Callable[..., Finetune]
) -> None:
    with pytest.raises(UserError) as caught:
        run(mistake(settings, jsonl))
    assert "\n" not in str(caught.value)
    assert not settings.out.exists()


@pytest.mark.usefixtures("brisk")
def test_another_run_or_other_settings_are_refused_before_anything_is_written(settings: Finetune) -> None:
    run(replace(settings, steps=2))
    before = {p: p.stat().st_mtime_ns for p in settings.out.rglob("*")}
    for wrong in (
        replace(settings, steps=2),
        replace(settings, resume=True),
        replace(settings, steps=2, resume=True, lr=1.0),
    ):
        with pytest.raises(UserError):
            run(wrong)
    assert {p: p.stat().st_mtime_ns for p in settings.out.rglob("*")} == before
    run(replace(settings, steps=2, overwrite=True))


@pytest.mark.usefixtures("brisk")
def test_chats_and_padding_and_sixteen_bits(settings: Finetune, jsonl: Callable[..., Path]) -> None:
    talks = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
        for n in range(8)
    ]
    odd = replace(settings, data=jsonl(*talks), packing=False, dtype="bfloat16", prompts=("2+1?",), checkpointing=True)
    record = run(replace(odd, lisa=Lisa(active=1, period=3), masters=True))
    assert record.table("samples")[0]["prompt"] == "user: 2+1?\nassistant: "
    assert record.table("held_out")[-1]["loss"] < record.table("held_out")[0]["loss"]
