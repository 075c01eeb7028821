"""Documents, questions and other text as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.data import load_text
from sparing.errors import UserError
from sparing.jobs.adapt.documents import Document, Question, chapters, documents, split
from sparing.jobs.adapt.lm import Language, padded, positions
from sparing.seeds import stream

BOOKS = ("bryant-stories", "burgess-busterbrown")
"""Where documents come from: children's stories, near to what stories15M knows."""

ELSEWHERE = "alice"
"""Other text, on which adapting shall change little."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Questions as ids: the start token, the end of the question, the answer."""

    ids: Tensor
    """Shape (Q, L), padded on the right."""

    rows: Tensor
    """Shape (a,): of each answer token, its question."""

    cols: Tensor
    """Shape (a,): of each answer token, the position before it."""

    prompts: tuple[Tensor, ...]
    """Ids of each question without its answer."""

    wanted: tuple[str, ...]
    """The answers."""

    asking: tuple[str, ...]
    """The questions as text, uncut."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Documents in the order in which they arrive, and what is asked about them afterwards."""

    texts: tuple[Tensor, ...]
    """Ids of each document, shape (L_t,), the start token first; no padding."""

    asked: Asked
    """Every question about them."""

    words: tuple[str, ...] = ()
    """The documents as text."""


@dataclass(frozen=True, slots=True, eq=False)
class Materials:
    """All the text of a run."""

    plain: tuple[Document, ...]
    """What the base model is tuned on: no question is about it."""

    train: tuple[Document, ...]
    """Meta-train."""

    validation: tuple[Document, ...]
    """Meta-validation."""

    test: tuple[Document, ...]
    """Meta-test."""

    elsewhere: tuple[Tensor, ...]
    """Other text for the locality term of meta-training; ids, each of shape (L,)."""

    elsewhere_test: tuple[Tensor, ...]
    """Other text for measuring locality, not the same."""


def ask_in_ids(lm: Language, questions: Sequence[Question], *, context: int) -> Asked:
    """Questions as token ids.

    Args:
        lm: Whose tokens.
        questions: At least one.
        context: Most tokens of a question; of a longer one the end is kept.

    Returns:
        Them.
    """
    prompts: list[Tensor] = []
    texts: list[Tensor] = []
    rows: list[int] = []
    cols: list[int] = []
    for question in questions:
        prompt = lm.encode(question.prompt)
        both = lm.encode(f"{question.prompt} {question.answer}")
        answer = both[len(prompt) :]
        prompt = [lm.start, *prompt[-context:]]
        prompts.append(torch.tensor(prompt))
        texts.append(torch.tensor(prompt + answer))
        rows += [len(texts) - 1] * len(answer)
        cols += range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    asking, wanted = zip(*((question.prompt, question.answer) for question in questions), strict=True)
    return Asked(padded(texts), torch.tensor(rows), torch.tensor(cols), tuple(prompts), wanted, asking)


def stream_of(lm: Language, chosen: Sequence[Document], *, context: int = 32) -> Stream:
    """Documents and their questions as token ids.

    Args:
        lm: Whose tokens.
        chosen: Documents in order of arrival.
        context: Most tokens of a question.

    Returns:
        The stream.
    """
    texts = tuple(torch.tensor([lm.start, *lm.encode(document.text)]) for document in chosen)
    questions = [question for document in chosen for question in document.questions]
    return Stream(texts, ask_in_ids(lm, questions, context=context), tuple(document.text for document in chosen))


def passages(lm: Language, book: str, *, length: int) -> list[Tensor]:
    """Cut a book into passages of equal length.

    Args:
        lm: Whose tokens.
        book: Plain text.
        length: Tokens of each, start token included.

    Returns:
        Ids, each of shape (length,); a rest is left out.
    """
    ids = lm.encode(" ".join(sentence for chapter in chapters(book) for sentence in chapter))
    size = length - 1
    return [torch.tensor([lm.start, *ids[at : at + size]]) for at in range(0, len(ids) - size + 1, size)]


def materials(lm: Language, books: Sequence[str], elsewhere: str, *, length: int) -> Materials:
    """Make everything from plain text.

    Args:
        lm: Whose tokens.
        books: What documents are made from.
        elsewhere: What locality is measured on; its first half serves meta-training, its second the final answer.
        length: Most tokens of a document, start token included.

    Returns:
        The parts.

    Raises:
        UserError: If a part has no document.
    """
    made = [documents(book, lambda text: len(lm.encode(text)), length=length - 1) for book in books]
    parts = split(made)
    other = passages(lm, elsewhere, length=length)
    if not (parts.train and parts.validation and parts.test and len(other) > 1):
        why = "too few sentences of it name anything"
        raise UserError("books", got=f"{len(parts.train)} documents with a question", why=why, do="pass longer books")
    half = len(other) // 2
    return Materials(parts.plain, parts.train, parts.validation, parts.test, tuple(other[:half]), tuple(other[half:]))


def from_assets(lm: Language, *, length: int) -> Materials:
    """The texts of the job: two children's books, and Alice for locality.

    Args:
        lm: Whose tokens.
        length: Most tokens of a document.

    Returns:
        The parts.
    """
    return materials(lm, [load_text(name) for name in BOOKS], load_text(ELSEWHERE), length=length)


def run_of(parts: Sequence[Document], count: int, *, seed: int, labels: tuple[str | int, ...]) -> tuple[Document, ...]:
    """Consecutive documents from a place drawn by seed and labels.

    Args:
        parts: To take from.
        count: How many; all of them where there are not so many.
        seed: Which run.
        labels: What for.

    Returns:
        ``min(count, len(parts))`` documents.
    """
    last = max(1, len(parts) - count + 1)
    first = int(torch.randint(last, (1,), generator=stream(seed, *labels)))
    return tuple(parts[first : first + count])


def live(texts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where the weights of each document stand in ψ.

    Args:
        texts: Ids, each of shape (L_t,).

    Returns:
        (first, end) per document; ψ has one entry per token but the start tokens, so none is padding.
    """
    ends, at = [], 0
    for text in texts:
        ends.append((at, at + len(text) - 1))
        at += len(text) - 1
    return ends


__all__ = ["Asked", "Materials", "Stream", "from_assets", "live", "materials", "positions", "run_of", "stream_of"]
