"""Tiny Llamas on disk, with tokenizers of whole words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WORDS = ("<unk>", "</s>", "red", "green", "blue", "one", "two")


def write_tokenizer(folder: Path, words: Sequence[str], added: Sequence[str] = (), **settings: Any) -> None:
    """Write tokenizer.json and its settings; the first two words, and the added ones, are special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [*words[:2], *added]
    ids = [*range(2), *range(len(words), len(words) + len(added))]
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": at, "content": word, **flags} for at, word in zip(ids, special, strict=True)],
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))


def write_sentencepiece(file: Path, pieces: Sequence[str]) -> None:
    """Write a SentencePiece model: a field 1 for each piece, with its text (field 1) and score (field 2)."""
    inner = [b"\x0a" + bytes([len(one.encode())]) + one.encode() + b"\x15\0\0\0\0" for one in pieces]
    file.write_bytes(b"".join(b"\x0a" + bytes([len(one)]) + one for one in inner) + b"\x12\x02\x18\x02")


def write_llama(
    folder: Path, seed: int, *, rows: int = len(WORDS), layers: int = 3, tied: bool = False, **config: Any
) -> Path:
    """Write weights (float32, near those of every other seed) and the config of a Llama."""
    folder.mkdir(parents=True)
    near, own = (torch.Generator().manual_seed(at) for at in (0, seed + 1))
    shapes = {"model.embed_tokens.weight": (rows, 8), "model.norm.weight": (8,)}
    shapes |= {} if tied else {"lm_head.weight": (rows, 8)}
    for at in range(layers):
        block = f"model.layers.{at}."
        shapes |= {f"{block}self_attn.{one}_proj.weight": (8, 8) for one in "qkvo"}
        shapes |= {f"{block}mlp.{one}_proj.weight": (12, 8) for one in ("gate", "up")}
        shapes |= {f"{block}mlp.down_proj.weight": (8, 12)}
        shapes |= {f"{block}{one}_layernorm.weight": (8,) for one in ("input", "post_attention")}
    state = {
        name: torch.randn(shape, generator=near) + 0.1 * torch.randn(shape, generator=own)
        for name, shape in shapes.items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": rows,
        "bos_token_id": 1, "eos_token_id": 1, "dtype": "float32", "tie_word_embeddings": tied, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def llama(folder: Path, seed: int, added: Sequence[str] = (), **config: Any) -> Path:
    """Write a Llama with its tokenizer."""
    write_llama(folder, seed, **({"rows": len(WORDS) + len(added)} | config))
    write_tokenizer(folder, WORDS, added)
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
