"""What a run reads: texts, cut by position into what is learnt and what is not, and the tokens they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.data import ASSETS, bundled_text, load_text, wiki_articles
from sparing.errors import UserError, require
from sparing.jobs.lm.models import load_tokenizer
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.jobs.pretrain.settings import Pretrain

DUMP_BYTES = 8_000_000  # leading bytes of a wiki dump that are read unless ``first`` says otherwise (bytes)

OPENING = 8  # words of held-out text that a sample begins with


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Held-out text as rows, with what makes its loss comparable between tokenizers."""

    rows: Packed  # token rows of the context's length
    size: int  # bytes of the text, UTF-8
    tokens: int  # tokens of the text, before it is cut into rows

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for."""
        return self.size / self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A tokenizer, tokens to learn and rows to measure on."""

    tokenizer: Any
    train: Tensor  # tokens to learn, int64, shape (n,)
    validation: Part  # measured along the way
    test: Part  # measured once, after the end
    openings: tuple[str, ...]  # first words of places in the validation part, for samples to continue
    unknown: int = 0  # tokens of the held-out parts that the tokenizer does not know (count)


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


def cut(text: str, held_out: float) -> tuple[str, str, str]:
    """Cut a text into training, validation and test part, after line ends where there are any near.

    Example:
        >>> cut("aaaa bb cc", 0.4)
        ('aaaa b', 'b ', 'cc')
    """
    # Validation before test, and both at the end: a text's order is kept, so nothing held out precedes what is learnt.
    marks = [round(len(text) * (1 - held_out)), round(len(text) * (1 - held_out / 2))]
    slack = max(1, round(len(text) * held_out / 20))
    ends = [(mark, text.find("\n", mark, mark + slack)) for mark in marks]
    first, second = (mark if end < 0 else end + 1 for mark, end in ends)
    return text[:first], text[first:second], text[second:]


def _part(tokenizer: Any, texts: Sequence[str], context: int, name: str) -> Part:
    ids = encode(tokenizer, texts)
    enough = len(ids) >= context
    do = "pass more text, a larger --held-out or a smaller --length"
    require(enough, "data", f"{len(ids)} tokens of {name} text", f"one row has {context}", do)
    return Part(pack_stream(ids, context), sum(len(text.encode()) for text in texts), len(ids))


def openings(text: str, count: int) -> tuple[str, ...]:
    """The first words of up to ``count`` paragraphs spread over a text.

    Example:
        >>> openings("One two three four five six seven eight nine ten eleven.", 1)
        ('One two three four five six seven eight',)
    """
    paragraphs = [words for part in text.split("\n\n") if len(words := part.split()) > OPENING]
    chosen = paragraphs[:: max(1, len(paragraphs) // max(1, count))][:count]
    return tuple(" ".join(words[:OPENING]) for words in chosen)


def gather(settings: Pretrain, context: int) -> Inputs:
    """Read, cut and encode everything; nothing is written."""
    parts = [cut(read_text(name, settings.first), settings.held_out) for name in settings.data]
    learnt, validation, test = (list(column) for column in zip(*parts, strict=True))
    tokenizer = tokenizer_for(settings.tokenizer, "".join(learnt), settings.vocabulary)
    train = encode(tokenizer, learnt)
    enough = len(train) > context + 1
    do = "pass more text or a smaller --length"
    require(enough, "data", f"{len(train)} tokens to learn", f"a row has {context} and one to predict", do)
    held = [_part(tokenizer, texts, context, name) for texts, name in ((validation, "held-out"), (test, "test"))]
    missing = tokenizer.unk_token_id
    unknown = 0 if missing is None else sum(int((part.rows.ids == missing).sum()) for part in held)
    starts = openings("\n\n".join(validation), settings.samples)
    return Inputs(tokenizer, train, held[0], held[1], starts, unknown)


def crops(ids: Tensor, *, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens of random rows of a long text, int64, (batch, context), from the generator alone."""
    # One token past the row is needed as the last target, so the last start is excluded.
    starts = torch.randint(0, len(ids) - context, (batch, 1), generator=generator)
    rows = ids[starts + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


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
    require(Path(choice).is_dir(), "tokenizer", choice, "it is no word we know and no directory", do)
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
