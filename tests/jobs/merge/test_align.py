"""``sparing merge --align``: strangers in one order before they are merged."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from refusals import refused
from sparing.cli import main
from sparing.jobs.merge import Settings, job, run
from sparing.jobs.subjects.nets import initialize
from sparing.seeds import stream
from sparing.valley.aligning.symmetry import symmetry_of

ROWS = {"length": 16, "rows": 4, "points": 3}


@pytest.fixture(autouse=True)
def _pageless(monkeypatch):
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


@pytest.fixture
def shuffled(family, tmp_path):
    """The folder of a language model: "a", moved by a thousandth, in an order of units that hides the shared origin."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(family["a"], dtype=torch.float32)
    inputs = {"input_ids": zoo.tokens(vocab=8)["input_ids"], "use_cache": False}
    symmetry = symmetry_of(model.eval(), (), inputs)
    orders = {
        leaf: torch.randperm(leaf.size, generator=stream(at, "test-merge-align"))
        for at, leaf in enumerate(symmetry.groups)
    }
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter += 1e-3 * torch.randn(parameter.shape, generator=stream(at, "test-merge-align", "moved"))
    model.load_state_dict(symmetry.reordered(model.state_dict(), orders))
    folder = tmp_path / "shuffled"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(family["a"]).save_pretrained(folder)
    return folder


def test_a_shuffled_model_is_offered_alignment_and_merges_into_what_it_was(family, shuffled, text, tmp_path, capsys):
    blind = run(Settings(models=(family["a"], shuffled), out=tmp_path / "blind"))
    assert "--align activations, with --data" in blind.table("outlook")[0]["sentence"]
    capsys.readouterr()
    command = ["merge", family["a"], shuffled, "--align", "weights", "--data", text, "--out", tmp_path / "out"]
    command += ["--length", 16, "--rows", 4, "--points", 3, "--method", "soup"]
    assert main([str(one) for one in command]) == 0
    said = capsys.readouterr().err
    assert "aligned: B (shuffled): 9" in said
    assert "prediction, aligned: The weights say that they will merge." in said
    one, merged = (load_file(folder / "model.safetensors") for folder in (family["a"], tmp_path / "out" / "model"))
    for name, value in one.items():
        assert float((merged[name] - value).abs().max()) < 0.003  # half of five deviations
    assert (tmp_path / "out" / "aligned" / "1" / "config.json").exists()


def test_files_of_weights_are_aligned_by_what_their_units_answer(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(
        "from sparing.jobs.subjects.nets import Vgg\ndef make(): return Vgg(1, widths=(4, 8))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from sparing.jobs.merge.inputs import net_of

    for seed, name in enumerate(("one", "two")):
        save_file(initialize(lambda: net_of("own_nets:make"), seed=seed).state_dict(), tmp_path / f"{name}.safetensors")
    paths = tuple(tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    rows = {"data": "digits", "entry": "own_nets:make", "rows": 20, "calibration": 30, "points": 3}
    record = run(Settings(models=paths, method="soup", align="activations", out=tmp_path / "out", **rows))
    before, after = load_file(paths[1]), load_file(tmp_path / "out" / "aligned" / "1" / "model.safetensors")
    weight = "layers.0.conv.weight"
    assert not torch.equal(before[weight], after[weight])
    assert torch.equal(before[weight].flatten().sort().values, after[weight].flatten().sort().values)
    parents = [row for row in record.table("models") if row["kind"] == "parent"]
    plain = run(Settings(models=paths, method="soup", out=tmp_path / "plain", **rows))
    # the reordered model answers as it did
    assert parents[1]["loss"] == pytest.approx(plain.table("models")[1]["loss"], rel=1e-5)
    assert json.loads((tmp_path / "out" / "record.jsonl").read_text().splitlines()[0])


def test_refusals(tmp_path):
    two = {"models": (tmp_path / "a", tmp_path / "b"), "align": "weights"}
    refused("data: got none; units are reordered by a forward pass", Settings, **two)
    refused("align: got weights with --base", Settings, **two, data="alice", base=tmp_path / "c")
