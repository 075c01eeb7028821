"""What a run reads: texts, cut by position into what is learnt and what is not, and turned into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.data import ASSETS, bundled_text, load_text, wiki_articles
from sparing.errors import UserError, require
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.tokens import encode, tokenizer_for

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
    first, second = (_line_end(text, mark, slack) for mark in marks)
    return text[:first], text[first:second], text[second:]


def _line_end(text: str, mark: int, slack: int) -> int:
    """The place after the first line end within ``slack`` characters of a mark, or the mark."""
    found = text.find("\n", mark, mark + slack)
    return mark if found < 0 else found + 1


def _part(tokenizer: Any, texts: Sequence[str], context: int, name: str) -> Part:
    ids = encode(tokenizer, texts)
    enough = len(ids) >= context
    do = "pass more text, a larger --held-out or a smaller --context"
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
    do = "pass more text or a smaller --context"
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
