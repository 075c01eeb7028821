"""The weights of the lowest held-out loss: those of a run that ends there, however often it was stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.finetune.test_job import same, weights
from sparing.errors import UserError
from sparing.jobs.checkpoint import saved
from sparing.jobs.finetune import Finetune, StoppedError, loop, run, state
from sparing.jobs.finetune.best import best_row
from sparing.jobs.finetune.settings import Lisa
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.packing import Packed
from sparing.report import Record


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    """A rate so high that the held-out loss soon rises again."""
    usual = {"length": 32, "held_out": 0.3, "steps": 9, "accumulate": 2, "max_new_tokens": 0, "schedule": "constant"}
    return Finetune(
        model=model_dir, data=data_file, out=tmp_path / "out", lr=0.1, lisa=Lisa(active=1, period=2),
        lora=Lora(rank=2), evaluate_every=1, keep="best", **usual,
    )  # fmt: skip


@pytest.mark.parametrize(("method", "tilt"), [("lisa", 0.0), ("lora", 0.2)])
def test_the_best_is_the_run_that_ends_there(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch, method: str, tilt: float
) -> None:
    """LISA: blocks that train after the best step go back to what they were."""
    measured = loop._loss_on

    def tilted(training: state.TrainState, data: Packed) -> tuple[float, int]:
        # LoRA's loss falls and stays level: which step is best is a matter of rounding without this
        loss, tokens = measured(training, data)
        return loss + tilt * abs(training.step - 6), tokens

    monkeypatch.setattr(loop, "_loss_on", tilted)
    steps = 9
    settings = replace(settings, method=method, lr=0.3, steps=steps)
    record = run(settings)
    best = best_row(record)
    assert 0 < best["step"] < steps, record.table("held_out")
    assert record.table("exported") == [{"step": best["step"], "loss": best["loss"]}]
    short = replace(settings, steps=best["step"], keep="last", out=settings.out.with_name("short"))
    run(short)
    assert same(weights(settings.out), weights(short.out))
    assert f"weights of step {best['step']}" in (settings.out / "report.html").read_text(encoding="utf-8")
    assert len(list((settings.out / "best").iterdir())) == 1


@pytest.mark.parametrize("after", range(2, 9, 2))
@pytest.mark.usefixtures("brisk")
def test_stopped_anywhere_it_exports_the_same(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch, after: int, tmp_path: Path
) -> None:
    """Killed, not asked: the run goes on from a checkpoint that is older than the best weights on the disk."""
    straight = run(replace(settings, out=tmp_path / "straight"))
    whole = state.gradients_

    def dying(training, data):
        if training.step == after:
            raise RuntimeError("the power is gone")
        return whole(training, data)

    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", dying)
        with pytest.raises(RuntimeError, match="power"):
            run(replace(settings, save_every=3))
    found = saved(settings.out / "checkpoints")
    assert [int(path.name[5:]) for path in found] == [step for step in (3, 6) if step <= after][-2:]
    rest = run(replace(settings, save_every=3, resume=True))
    assert rest.table("exported") == straight.table("exported")
    assert same(weights(settings.out), weights(tmp_path / "straight"))


@pytest.mark.usefixtures("brisk")
def test_a_better_step_after_the_checkpoint_may_not_come_again(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 4 with a checkpoint at 3; resumed, all that follows measures worse, as another device may."""
    whole, taken = state.gradients_, loop.held_out_loss
    losses = iter([5.0, 4.0, 3.0, 3.5, 2.0])

    def dying(training, data):
        if training.step == 4:
            raise RuntimeError("the power is gone")
        return whole(training, data)

    settings = replace(settings, save_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", dying)
        patch.setattr(loop, "held_out_loss", lambda *a, **k: (next(losses), taken(*a, **k)[1]))
        with pytest.raises(RuntimeError, match="power"):
            run(settings)
    monkeypatch.setattr(loop, "held_out_loss", lambda *a, **k: (9.0, taken(*a, **k)[1]))
    assert run(replace(settings, resume=True)).table("exported") == [{"step": 2, "loss": 3.0}]
    assert [file.name for file in (settings.out / "best").iterdir()] == ["step-00000002.safetensors"]


@pytest.mark.usefixtures("brisk")
def test_a_finished_run_exports_it_again(settings: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(settings)
    before = weights(settings.out)
    assert run(replace(settings, resume=True)).rows == first.rows
    assert same(before, weights(settings.out))
    (file,) = (settings.out / "best").iterdir()
    file.unlink()
    with pytest.raises(UserError, match="the best weights are gone"):
        run(replace(settings, resume=True))


def test_of_equal_losses_the_first_is_best() -> None:
    record = Record(question="", settings={}, seed=0, environment={})
    for step, loss in ((0, 3.0), (1, 2.0), (2, 2.0), (3, 2.5)):
        record.add("held_out", step=step, loss=loss)
    assert best_row(record)["step"] == 1


@pytest.mark.usefixtures("brisk")
def test_a_signal_between(settings: Finetune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(replace(settings, out=tmp_path / "straight"))
    whole = state.gradients_

    def asked(training, data):
        if training.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(training, data)

    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", asked)
        with pytest.raises(StoppedError):
            run(settings)
    # which weights are the best depends on when they are measured
    with pytest.raises(UserError, match="evaluate_every"):
        run(replace(settings, resume=True, evaluate_every=2))
    run(replace(settings, resume=True))
    assert same(weights(settings.out), weights(tmp_path / "straight"))


@pytest.mark.parametrize("changes", [{"evaluate_every": 0}, {"held_out": 0.0}, {"plan": "NNN"}])
def test_a_best_that_nothing_measures_is_refused(settings: Finetune, changes: dict) -> None:
    with pytest.raises(UserError, match="keep: got best"):
        replace(settings, **changes)
