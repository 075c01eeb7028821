"""A tiny model directory with a byte-level tokenizer, as a user would have it on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zoo

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template without generation markers."""


def _byte_tokenizer(template: str | None = None):
    """256 bytes and two specials; every text comes back as it went in."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {piece: index for index, piece in enumerate([*alphabet, "<|end|>", "<|pad|>"])}
    raw = Tokenizer(models.BPE(vocab=words, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A function from chat templates to tokenizers."""
    return _byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    return _byte_tokenizer(TEMPLATE)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand float32 weights beside its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    zoo.llama(layers=3, vocab=258, dtype=torch.float32).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [f"The {animal} sat on the {place}." for animal in ("cat", "dog", "hen") for place in ("mat", "log", "wall")]


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as a JSONL file."""

    def write(*rows: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def data_file(jsonl: Callable[..., Path], texts: list[str]) -> Path:
    return jsonl(*({"text": text} for text in texts))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The loggers of other libraries as they were."""
    level = logging.getLogger("transformers").level
    yield
    logging.getLogger("transformers").setLevel(level)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, offline, and a working directory without any model."""
    from huggingface_hub import constants

    place = tmp_path / "hub"
    place.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return place
