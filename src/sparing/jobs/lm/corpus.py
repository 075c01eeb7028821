"""From a name or a file to text, and from text to tokens: assets, characters, byte pairs, tokenizers on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.data import ASSETS, bundled_text, load_text, wiki_articles
from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.lm.models import load_tokenizer

DUMP_BYTES = 8_000_000  # leading bytes of a wiki dump that are read unless ``first`` says otherwise (bytes)


def read_text(name: str, first: int | None = None) -> str:
    """The text of an asset, ``bundled`` or a file, its ``first`` bytes; of a wiki dump, the prose of its articles."""
    if name == "bundled":
        whole = bundled_text("alice") + "\n\n" + bundled_text("blake")
        return whole.encode()[:first].decode(errors="ignore")
    texts = [asset.name for asset in ASSETS if asset.kind == "text"]
    if name == "enwik8":
        return "\n\n".join(wiki_articles(load_text(name, first=first or DUMP_BYTES)))
    if name in texts:
        return load_text(name, first=first)
    path = Path(name)
    why = f"it is no file and none of {', '.join(['bundled', *texts])}"
    require(path.is_file(), "data", name, why, "pass one of these, or a UTF-8 text file")
    try:
        with path.open("rb") as file:
            return file.read().decode("utf-8") if first is None else file.read(first).decode("utf-8", errors="ignore")
    except UnicodeDecodeError as error:
        raise UserError("data", got=name, why=f"it is not UTF-8 (byte {error.start})", do="convert it") from None


# What stands between texts, and for characters that the training part does not have.
END, UNKNOWN = "<|endoftext|>", "<|unknown|>"

PIECE = 1 << 20  # characters that are encoded at once; longer texts are cut at line ends (count)


def characters(text: str) -> Any:
    """A tokenizer of the characters of a text, in order of their code points; others become ``UNKNOWN``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = {piece: index for index, piece in enumerate([END, UNKNOWN, *sorted(set(text))])}
    raw = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    # not a dot, which leaves line breaks out
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # without a decoder, tokens are joined by spaces
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
    do = "pass char, bpe or a directory that save_pretrained wrote"
    there = Path(choice).is_dir() or hub.name_of(choice) is not None
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
