"""Folders of transformers as material: rows, normalisation, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from sparing.errors import UserError
from sparing.jobs.demo.tiny import _tokenizer
from sparing.jobs.scan import job, run
from sparing.jobs.scan.curves import curve_specs, present
from sparing.jobs.scan.inputs import gather
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.images import digits

transformers = pytest.importorskip("transformers")

TEXT = "Down the rabbit hole she went, and never once thought how she was to get out again. " * 20


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A GPT-2 of two blocks and its tokenizer."""
    path = tmp_path_factory.mktemp("gpt2")
    tokenizer = _tokenizer(TEXT)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A convolutional classifier with batch norm and its image processor."""
    path = tmp_path_factory.mktemp("resnet")
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=10
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.ResNetForImageClassification(config).save_pretrained(path)
    processor = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def test_a_language_model_is_scanned_by_its_loss(language, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "write_page", lambda record, path: path)
    (tmp_path / "text.txt").write_text(TEXT)
    fast = {
        "rows": 4,
        "length": 16,
        "points": 3,
        "draws": 2,
        "noises": ("gaussian",),
        "parameter_groups": ("norm", "conv"),
    }
    record = run(
        Settings(
            model=str(language), data=str(tmp_path / "text.txt"), out=tmp_path / "run",
            parts=("noises", "groups", "norms"), **fast,
        )
    )  # fmt: skip
    (model,) = record.table("model")
    assert (model["metric"], model["refreshed"]) == ("loss", False)
    assert "4 rows of 16 tokens of text.txt" in model["source"]
    assert {row["group"] for row in record.table("curves")} == {"all", "norm"}
    assert record.table("left_out") == [{"group": "conv"}]
    assert {row["kind"] for row in record.table("layers")} == {"LayerNorm"}


def test_images_are_prepared_as_the_folder_says(pictures):
    settings = Settings(model=str(pictures), data="digits", rows=12, calibration=30)
    inputs = gather(settings)
    _, test = digits()
    expected = (test[0][:12].float()[:, None].expand(-1, 3, -1, -1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(inputs.evaluate.inputs, expected)
    assert sum(map(len, inputs.calibrate)) == 30
    assert "classifier" in present(inputs.model, settings.parameter_groups)
    kinds = [spec.kind for spec in curve_specs(settings, groups=["all"], started=False)]
    assert "initial" not in kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "a language model needs text"),
        ({"data": "mnist"}, "it is no text"),
        ({"data": "missing.txt"}, "cannot be read"),
        ({"data": "alice", "length": 64}, "the model has 32 positions"),
    ],
)
def test_what_does_not_fit_a_language_model(language, changes, words):
    with pytest.raises(UserError, match=words):
        gather(Settings(model=str(language), **{"length": 16} | changes))


def test_what_does_not_fit_a_classifier(pictures, tmp_path):
    with pytest.raises(UserError, match="an image classifier needs images"):
        gather(Settings(model=str(pictures)))
    with pytest.raises(UserError, match="no known set of images"):
        gather(Settings(model=str(pictures), data="alice"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="neither a causal"):
        gather(Settings(model=str(tmp_path), data="digits"))


def test_a_torn_folder_is_refused(language, tmp_path):
    for file in language.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be loaded as a causal language model"):
        gather(Settings(model=str(tmp_path), data="alice", length=16))


def test_the_folder_of_one_of_our_runs_is_opened(language, tmp_path):
    (tmp_path / "model").symlink_to(language)
    assert gather(Settings(model=str(tmp_path), data="alice", length=16, rows=2)).name == "model"
