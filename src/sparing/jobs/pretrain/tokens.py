"""Tokenizers: learnt from the training part of a text, or loaded; both are ordinary transformers tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.jobs.lm.models import load_tokenizer

# What stands between texts, and for characters that the training part does not have.
END, UNKNOWN = "<|endoftext|>", "<|unknown|>"

PIECE = 1 << 20  # characters that are encoded at once; longer texts are cut at line ends (count)


def characters(text: str) -> Any:
    """A tokenizer of the characters of a text, in order of their code points; others become ``UNKNOWN``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = {piece: index for index, piece in enumerate([END, UNKNOWN, *sorted(set(text))])}
    raw = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return _wrapped(raw, unk_token=UNKNOWN)


def byte_pairs(text: str, vocabulary: int) -> Any:
    """A lossless byte-pair tokenizer with at most ``vocabulary`` tokens, 256 bytes and ``END`` included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    how: Any = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    raw.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(vocab_size=vocabulary, **how))
    return _wrapped(raw)


def _wrapped(raw: Any, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    ends = {"bos_token": END, "eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **ends, **special)


def tokenizer_for(choice: str, text: str, vocabulary: int) -> Any:
    """The tokenizer that a setting means: ``char``, ``bpe`` or a directory."""
    if choice in {"char", "bpe"}:
        return characters(text) if choice == "char" else byte_pairs(text, vocabulary)
    there = Path(choice).is_dir()
    do = "pass char, bpe or a directory that save_pretrained wrote"
    require(there, "tokenizer", choice, "it is no word we know and no directory", do)
    try:
        return load_tokenizer(Path(choice))
    except UserError as error:
        raise UserError("tokenizer", got=error.got, why=error.why, do=do) from None


def _pieces(text: str) -> list[str]:
    """Parts of at most about ``PIECE`` characters, cut after a line end where there is one."""
    parts, start = [], 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            # A line end is where a token across the border is least likely.
            stop = text.rfind("\n", start, stop) + 1 or stop
        parts.append(text[start:stop])
        start = stop
    return parts


def encode(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Concatenate texts as token ids, int64, (n,), each followed by the end of text where the tokenizer has one."""
    ids: list[int] = []
    for text in texts:
        for piece in _pieces(text):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.int64)
