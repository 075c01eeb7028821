"""Documents, questions and other text as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.adapt.documents import Document, Question, chapters, documents, split
from sparing.jobs.adapt.lm import LanguageModel, padded
from sparing.seeds import stream

BOOKS = ("bryant-stories", "burgess-busterbrown")
"""Where documents come from: children's stories, near to what stories15M knows."""

ELSEWHERE = "alice"  # other text, on which adapting shall change little


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Questions as ids: the start token, the end of the question, the answer."""

    ids: Tensor  # (Q, L), padded on the right
    rows: Tensor  # (a,): of each answer token, its question
    cols: Tensor  # (a,): of each answer token, the position before it
    prompts: tuple[Tensor, ...]  # ids of each question without its answer
    expected: tuple[str, ...]  # the answers as text
    prompt_texts: tuple[str, ...]  # the questions as text, uncut


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Documents in the order in which they arrive, and what is asked about them afterwards."""

    texts: tuple[Tensor, ...]  # ids of each document, (L_t,), the start token first; no padding
    questions: Questions


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All the text of a run."""

    plain: tuple[Document, ...]  # the base model is tuned on these: no question is about them
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    test: tuple[Document, ...]
    elsewhere: tuple[Tensor, ...]  # other text for the locality term of meta-training; ids, (L,) each
    elsewhere_test: tuple[Tensor, ...]  # other text for measuring locality, not the same


def encode_questions(lm: LanguageModel, questions: Sequence[Question], *, context: int) -> Questions:
    """Questions as token ids; of one longer than ``context`` tokens the end is kept."""
    prompts: list[Tensor] = []
    texts: list[Tensor] = []
    rows: list[int] = []
    cols: list[int] = []
    for question in questions:
        prompt = lm.encode(question.prompt)
        # encoded together: an answer in mid-sentence has other tokens than at the beginning of a text
        both = lm.encode(f"{question.prompt} {question.answer}")
        answer = both[len(prompt) :]
        prompt = [lm.start, *prompt[-context:]]
        prompts.append(torch.tensor(prompt))
        texts.append(torch.tensor(prompt + answer))
        # the score of a token is read at the position before it
        rows += [len(texts) - 1] * len(answer)
        cols += range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    prompt_texts, expected = zip(*((question.prompt, question.answer) for question in questions), strict=True)
    return Questions(padded(texts), torch.tensor(rows), torch.tensor(cols), tuple(prompts), expected, prompt_texts)


def stream_of(lm: LanguageModel, chosen: Sequence[Document], *, context: int = 32) -> Stream:
    """Documents in order of arrival, and their questions, as token ids."""
    texts = tuple(torch.tensor([lm.start, *lm.encode(document.text)]) for document in chosen)
    questions = [question for document in chosen for question in document.questions]
    return Stream(texts, encode_questions(lm, questions, context=context))


def passages(lm: LanguageModel, book: str, *, length: int) -> list[Tensor]:
    """Cut a book into passages of ``length`` tokens, start token included; a rest is dropped."""
    ids = lm.encode(" ".join(sentence for chapter in chapters(book) for sentence in chapter))
    size = length - 1
    return [torch.tensor([lm.start, *ids[at : at + size]]) for at in range(0, len(ids) - size + 1, size)]


def build_corpus(lm: LanguageModel, books: Sequence[str], elsewhere: str, *, length: int) -> Corpus:
    """Make everything from plain text; the first half of ``elsewhere`` serves meta-training, the second the test."""
    made = [documents(book, lambda text: len(lm.encode(text)), length=length - 1) for book in books]
    parts = split(made)
    other = passages(lm, elsewhere, length=length)
    if not (parts.train and parts.validation and parts.test and len(other) > 1):
        why = "too few sentences of it name anything"
        raise UserError("books", got=f"{len(parts.train)} documents with a question", why=why, do="pass longer books")
    half = len(other) // 2
    return Corpus(parts.plain, parts.train, parts.validation, parts.test, tuple(other[:half]), tuple(other[half:]))


def consecutive(
    parts: Sequence[Document], count: int, *, seed: int, labels: tuple[str | int, ...]
) -> tuple[Document, ...]:
    """``min(count, len(parts))`` consecutive documents from a place drawn by seed and labels."""
    last = max(1, len(parts) - count + 1)
    first = int(torch.randint(last, (1,), generator=stream(seed, *labels)))
    return tuple(parts[first : first + count])


def weight_spans(texts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(first, end) of each document's weights in ψ, which has one entry per token but the start tokens."""
    ends, at = [], 0
    for text in texts:
        ends.append((at, at + len(text) - 1))
        at += len(text) - 1
    return ends
