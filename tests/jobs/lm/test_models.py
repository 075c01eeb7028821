"""Model directories: opened when whole, refused in one line when not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from sparing.errors import UserError
from sparing.jobs.lm import models


def load(path: Path):
    return models.load_model(path, dtype=torch.float32)


def without_directory(path: Path) -> None:
    shutil.rmtree(path)


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def without_config(path: Path) -> None:
    (path / "config.json").unlink()


def torn_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": ')


def foreign_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "no-such-kind"}')


def quantised(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (path / "config.json").write_text(json.dumps(config))


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def pickled(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    without_weights(path)
    torch.save(weights, path / "pytorch_model.bin")


def torn_weights(path: Path) -> None:
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(raw[: len(raw) // 2])


def a_weight_short(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def another_shape(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


BROKEN = {
    without_directory: "no such directory",
    a_file: "not a directory",
    without_config: "no config.json",
    torn_config: "config.json is broken",
    foreign_config: "config.json is broken",
    quantised: "quantised",
    without_weights: "safetensors",
    pickled: "pickled",
    torn_weights: "cannot be loaded",
    a_weight_short: "up_proj",
    another_shape: "model.norm.weight|cannot be loaded",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_directory_is_named_in_one_line(
    tmp_path: Path, model_dir: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "m"
    shutil.copytree(model_dir, path)
    damage(path)
    with pytest.raises(UserError, match=BROKEN[damage]) as caught:
        load(path)
    assert str(caught.value).startswith(f"model: got {path}; ")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_causal(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=32)
    ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="causal language model"):
        load(tmp_path)


def test_weights_come_back_and_the_global_generator_is_not_touched(model_dir: Path) -> None:
    before = torch.get_rng_state()
    model = models.load_model(model_dir, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    want = zoo.llama(layers=3, vocab=258, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, want[name].double()) for name, value in model.state_dict().items())


def test_limits_of_a_model(model_dir: Path) -> None:
    model = load(model_dir)
    assert (models.most_positions(model), models.vocabulary(model)) == (64, 258)


def test_a_tokenizer_must_lie_beside_the_model(tmp_path: Path, model_dir: Path) -> None:
    assert models.load_tokenizer(model_dir)("a")["input_ids"] == [64]
    shutil.copy(model_dir / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"tokenizer.*save_pretrained"):
        models.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no usable tokenizer"):
        models.load_tokenizer(tmp_path)


def test_the_fingerprint_sees_weights_settings_and_names(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(model_dir, path)
    first = models.hash_folder(path)
    assert first == models.hash_folder(model_dir)
    for name in ("model.safetensors", "config.json"):
        raw = bytearray((path / name).read_bytes())
        raw[-3] ^= 1
        (path / name).write_bytes(raw)
        assert models.hash_folder(path) != first
        first = models.hash_folder(path)


def test_the_fingerprint_sees_the_middle_of_a_large_file_whatever_its_clock_says(tmp_path: Path) -> None:
    """Another base model of the same shapes differs anywhere; here in one byte, 2 MiB from both ends."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(2**22))
    os.utime(file, ns=(1, 1))  # long ago, so that the hash may be remembered
    first, before = models.hash_folder(tmp_path), file.stat()
    assert models.hash_folder(tmp_path) == first
    with file.open("r+b") as opened:
        opened.seek(2**21)
        opened.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert models.hash_folder(tmp_path) != first


def test_a_file_is_hashed_once_while_nobody_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_TICK", 0)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = models.hash_folder(tmp_path)
    monkeypatch.setattr(models, "digest", lambda path: pytest.fail(f"{path} was read again"))
    assert models.hash_folder(tmp_path) == first


def test_what_is_saved_transformers_loads(tmp_path: Path, model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = load(model_dir)
    models.save_pretrained(model, models.load_tokenizer(model_dir), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path).decode([64]) == "a"


def test_a_missing_extra_is_not_blamed_on_the_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"^transformers: got not installed"):
        models.config_of(tmp_path)
