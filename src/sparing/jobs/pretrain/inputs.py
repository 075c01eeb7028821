"""What a run reads: texts, cut by position into what is learnt and what is not, and the rows they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.errors import require
from sparing.jobs.lm.corpus import encode, read_text, tokenizer_for
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.jobs.pretrain.settings import Pretrain

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
