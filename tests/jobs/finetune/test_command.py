"""``sparing finetune`` as a person runs it: every mistake is one line, exit status 2, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import zoo
from sparing.cli import main

SHORT = ["--steps", "2", "--accumulate", "1", "--length", "24", "--max-new-tokens", "0"]


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command that must be refused; gives its one line."""

    def run(*arguments: object, out: Path | None = None) -> str:
        folder = out or tmp_path / "out"
        before = sorted(folder.rglob("*")) if folder.exists() else None
        status = main(["finetune", *map(str, arguments), "--out", str(folder)])
        streams = capsys.readouterr()
        lines = [line for line in streams.err.splitlines() if line.startswith("sparing: ")]
        assert (status, streams.out, len(lines)) == (2, "", 1), streams.err
        assert streams.err.splitlines()[-1] == lines[0]
        assert (sorted(folder.rglob("*")) if folder.exists() else None) == before
        return lines[0]

    return run


@pytest.fixture
def broken_model(model_dir, tmp_path):
    """A copy of the model to damage."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "good"}\n{"text": broken\n', "line 2"),
        ("", "empty"),
        ('{"words": "a"}\n', "words"),
        ('{"text": 3}\n', "line 1"),
        ('{"text": "a"}\n{"prompt": "b", "response": "c"}\n', "line 2"),
    ],
    ids=["broken line", "empty", "wrong field", "wrong type", "mixed kinds"],
)
def test_data_that_cannot_be_read(text, said, refused, model_dir, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    assert said in refused(model_dir, path, *SHORT)


def test_data_that_is_not_text(refused, model_dir, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    assert "UTF-8" in refused(model_dir, path, *SHORT)


def test_missing_files(refused, model_dir, data_file, tmp_path):
    assert "missing.jsonl" in refused(model_dir, tmp_path / "missing.jsonl", *SHORT)
    assert "no such directory" in refused(tmp_path / "missing", data_file, *SHORT)


def test_corrupt_weights(refused, broken_model, data_file):
    weights = broken_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be loaded" in refused(broken_model, data_file, *SHORT)


def test_quantised_parameters(refused, broken_model, data_file):
    config = json.loads((broken_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (broken_model / "config.json").write_text(json.dumps(config))
    assert "quantised" in refused(broken_model, data_file, *SHORT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--lisa.active", "9"], "active"),
        (["--lisa.period", "0"], "period"),
        (["--lr", "0"], "lr"),
        (["--lr", "-1"], "lr"),
        (["--lr", "nan"], "lr"),
        (["--length", "100000"], "length"),
        (["--dtype", "int3"], "dtype"),
    ],
    ids=" ".join,
)
def test_settings_that_cannot_work(given, said, refused, model_dir, data_file):
    assert said in refused(model_dir, data_file, *SHORT, *given)


def test_a_tied_embedding_cannot_freeze_alone(refused, broken_model, data_file):
    zoo.llama(layers=3, vocab=258, tied=True).float().save_pretrained(broken_model)
    assert "tied" in refused(broken_model, data_file, *SHORT, "--lisa.no-embed")


def test_a_model_without_blocks(refused, broken_model, data_file):
    zoo.llama(layers=0, vocab=258).float().save_pretrained(broken_model)
    assert "block" in refused(broken_model, data_file, *SHORT)


@pytest.mark.usefixtures("brisk")
def test_another_run_in_the_way_and_other_settings_on_resume(refused, model_dir, data_file, tmp_path, capsys):
    out = tmp_path / "done"
    assert main(["finetune", str(model_dir), str(data_file), *SHORT, "--out", str(out)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    assert "run" in refused(model_dir, data_file, *SHORT, out=out)
    assert "lr" in refused(model_dir, data_file, *SHORT, "--lr", "0.5", "--resume", out=out)


def test_a_loss_that_is_not_a_number_stops_the_run_with_status_one(broken_model, data_file, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(broken_model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken_model / "model.safetensors", metadata={"format": "pt"})
    arguments = ["finetune", str(broken_model), str(data_file), *SHORT, "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("sparing: ")
    assert "step 1: loss nan" in said
