"""The model card, as the Hugging Face hub reads it: what is known and nothing else."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from sparing.cli import _parse
from sparing.jobs.finetune import Finetune, run
from sparing.jobs.finetune.card import card, command_of
from sparing.jobs.finetune.job import _anew
from sparing.jobs.finetune.settings import Lisa
from sparing.jobs.lm.adapters import Lora
from sparing.report import format_number


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    usual = {"length": 32, "held_out": 0.3, "steps": 3, "max_new_tokens": 0}
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out", method="lora", lora=Lora(rank=2), **usual)


def test_the_hub_reads_it(settings: Finetune, model_dir: Path) -> None:
    record = run(settings)
    for folder, relation, library in (("model", "finetune", "transformers"), ("adapter", "adapter", "peft")):
        found = ModelCard.load(settings.out / folder / "README.md")
        assert found.data.to_dict() == {
            "base_model": model_dir.name, "base_model_relation": relation, "library_name": library,
            "pipeline_tag": "text-generation", "datasets": ["data.jsonl"], "tags": ["sparing", "lora"],
        }  # fmt: skip
        written = (settings.out / folder / "README.md").read_text(encoding="utf-8")
        assert "# license: not known here" in written
        for row in record.table("held_out")[::2]:
            assert f"{row['loss']:.2f}" in found.text
        total = record.table("memory")[-1]
        assert f"({total['predicted']:,} bytes)" in found.text
        assert f"({total['measured']:,} bytes)" in found.text
        assert "sparing finetune" in found.text
        assert "| Settings of LoRA | rank 2, alpha 32.0, dropout 0.0, targets all-linear, " in found.text
        assert record.environment["torch"] in found.text
        assert str(settings.out.parent) not in written
        assert str(model_dir.parent) not in written


@pytest.mark.usefixtures("brisk")
def test_a_licence_that_the_model_names_goes_with_it(settings: Finetune, tmp_path: Path) -> None:
    model = tmp_path / "a model: mine"
    shutil.copytree(settings.model, model)
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    run(replace(settings, model=model, method="full", steps=1))
    found = ModelCard.load(settings.out / "model" / "README.md")
    assert (found.data.license, found.data.base_model) == ("apache-2.0", "a model: mine")


def test_the_loss_is_that_of_what_is_saved(settings: Finetune) -> None:
    """QLISA: training measures a model with rounded blocks, and the exact one is saved."""
    record = run(replace(settings, method="lisa", weights="nf4", lisa=Lisa(active=1)))
    last = record.table("held_out")[-1]
    saved = next(row for row in record.rows if row["table"] == "saved")
    saved["loss"] = last["loss"] + 1
    settings = replace(settings, method="lisa", weights="nf4", lisa=Lisa(active=1))
    text = card(settings, record)
    assert f"| Held-out loss after (nat/token) | {format_number(saved['loss'])} |" in text
    assert "loss before, frozen blocks rounded to nf4 (nat/token)" in text
    # measured in main memory alone
    record.rows.remove(saved)
    assert f"after, frozen blocks rounded to nf4 (nat/token) | {format_number(last['loss'])} |" in card(
        settings, record
    )


def test_the_command_after_a_divergence_is_the_same_run_but_for_its_rate(
    settings: Finetune, model_dir: Path, tmp_path: Path
) -> None:
    given = replace(
        settings, out=tmp_path / "my runs" / "a b", data=(tmp_path / "a b.jsonl",), lr=2e-3, packing=False,
        dtype="bfloat16", overwrite=True,
    )  # fmt: skip
    words = shlex.split(_anew(given).partition(": ")[2])
    out = tmp_path / "my runs" / "a b-2"
    assert _parse("finetune", Finetune, words[2:]) == replace(given, lr=5e-4, out=out, overwrite=False)


def test_the_command_is_that_of_the_run() -> None:
    """Parsed again, it is the same settings, but for folders."""
    given = Finetune(
        model=Path("/models/small"), data=(Path("/data/a b.jsonl"), Path("c.parquet")), mix=(0.75, 0.25), steps=7,
        packing=False, prompts=("Hi, there",), lisa=Lisa(active=3, embed=False, sampler="reshuffle"), lora=Lora(rank=3),
    )  # fmt: skip
    line = command_of(given)
    assert "lora" not in line
    again = _parse("finetune", Finetune, shlex.split(line)[2:])
    assert again == replace(given, model=Path("small"), data=(Path("a b.jsonl"), Path("c.parquet")), lora=Lora())
