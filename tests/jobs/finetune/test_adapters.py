"""LoRA that goes on from an adapter, and DoRA, through the whole job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.finetune.test_job import same, weights
from sparing.errors import UserError
from sparing.jobs.finetune import Finetune, StoppedError, run, state
from sparing.jobs.lm import models
from sparing.jobs.lm.adapters import Lora


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    usual = {"length": 32, "held_out": 0.3, "steps": 5, "lr": 1e-2, "accumulate": 2, "max_new_tokens": 0}
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out", method="lora", lora=Lora(rank=2), **usual)


@pytest.mark.usefixtures("brisk")
def test_an_adapter_begins_where_it_ended(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(replace(settings, lora=Lora(rank=2, dora=True)))
    later = replace(settings, lora=Lora(adapter=settings.out / "adapter"), out=tmp_path / "later")
    straight = run(replace(later, out=tmp_path / "straight"))
    assert "was made for" not in capsys.readouterr().err
    assert straight.table("held_out")[0]["loss"] == first.table("held_out")[-1]["loss"]
    assert straight.table("held_out")[-1]["loss"] < straight.table("held_out")[0]["loss"]
    whole = state.gradients_

    def asked(training, data):
        if training.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(training, data)

    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", asked)
        with pytest.raises(StoppedError):
            run(later)
    file = later.lora.adapter / "adapter_model.safetensors"
    before = file.read_bytes()
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"lora\.adapter \(other content\)"):
        run(replace(later, resume=True))
    file.write_bytes(before)
    run(replace(later, resume=True))
    assert same(weights(later.out), weights(tmp_path / "straight"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Could not find a config:UserWarning")
def test_an_adapter_for_another_name_is_said(
    settings: Finetune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(settings.model)
    base.name_or_path = "somebody/Small-1B"
    config = LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path="somebody/Small-1B")
    get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    record = run(replace(settings, lora=Lora(adapter=tmp_path / "theirs")))
    assert "note: theirs: the adapter was made for Small-1B, and goes on in" in capsys.readouterr().err
    assert {tuple(t.shape) for t in load_file(settings.out / "adapter" / "adapter_model.safetensors").values()} == {
        (4, 16), (16, 4),
    }  # fmt: skip
    # and so says what is shared, with no path of this machine
    (step,) = record.table("step")
    assert "rank=4, alpha=8, dropout=0.0, targets='q_proj'" in step["method"]
    written = (settings.out / "record.jsonl").read_text() + (settings.out / "adapter" / "README.md").read_text()
    assert str(tmp_path) not in written
    assert "rank 4, alpha 8, dropout 0.0, targets q_proj, dora False, rslora False, adapter theirs" in written
    # prediction and measurement are of the adapter that is there: A and B of one map in each of three blocks
    assert {row["category"]: row["predicted"] for row in record.table("memory")}["optimizer"] >= 2 * 4 * 3 * 128
    assert torch.isfinite(torch.tensor(record.table("held_out")[-1]["loss"]))


@pytest.mark.slow
@pytest.mark.processes
def test_reading_an_adapter_says_nothing(settings: Finetune) -> None:
    """In a process of its own, for peft imports libraries that talk while they are imported."""
    run(settings)
    place = str(settings.out / "adapter")
    code = f"import pathlib; from sparing.jobs.lm import adapters; adapters.adapter_config(pathlib.Path({place!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_broken_adapter_is_refused_before_the_model_is_loaded(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings)
    adapter = settings.out / "adapter"
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=r"lora\.adapter: .*adapter_model.safetensors is broken"):
        run(replace(settings, lora=Lora(adapter=adapter), out=settings.out.with_name("later")))


def test_a_folder_without_an_adapter_is_refused_before_anything(settings: Finetune) -> None:
    with pytest.raises(UserError, match=r"lora\.adapter: .*it has no adapter_config.json"):
        run(replace(settings, lora=Lora(adapter=settings.model)))
    assert not settings.out.exists()
