"""Documents and the questions asked about them, made from a book by a rule, as text and as token ids.

The rule. A book is cut into paragraphs (headings, pictures and verse are dropped), paragraphs into sentences, and
consecutive sentences of one chapter are packed into documents. A sentence gives a question when it holds a proper
name or a number that is not its beginning and is not named earlier in the sentence: the question is the sentence up to
there, at least four words, and the answer is that name or number. A proper name is a run of capitalized words none of
which the book ever writes in small letters. One sentence gives at most one question, its first. So nothing is asked
that the document does not say, and the answer is never in the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

import torch
from torch import Tensor

from sparing.errors import require
from sparing.jobs.adapt.lm import LanguageModel, padded
from sparing.seeds import stream

FEWEST = 4  # words that a question has at least
WRITTEN = 8  # tokens that a model writes after a question, in which its answer is looked for (count)

SENTENCE = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]*[A-Z])""")
# a name follows a small letter or a comma: the first word of a sentence is capitalized anyway
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})*\b|(?<= )\d[\d,]*\b")
# the period of a title ends no sentence
TITLES = re.compile(r"\b(Mr|Mrs|Dr|St)\.")
WORD = re.compile(r"\b[a-z]+\b")


@dataclass(frozen=True, slots=True)
class Question:
    """A sentence's beginning and the name or number that it goes on with."""

    prompt: str  # the sentence up to the answer
    answer: str  # a run of capitalized words, or a number


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive sentences of one chapter."""

    text: str
    questions: tuple[Question, ...]


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is neither heading, picture nor verse."""
    text = paragraph.strip()
    if not text or text.upper() == text or text.startswith(("[", "*")):
        return False
    lines = [line.strip() for line in text.splitlines()]
    capital = sum(bool(re.match(r"[\"'(]*[A-Z]", line)) for line in lines)
    short = sum(map(len, lines)) / len(lines) < 50
    # verse: several short lines that mostly begin with a capital
    return not (len(lines) > 1 and short and capital > 0.7 * len(lines))


def chapters(book: str) -> list[list[str]]:
    """The sentences of a book, one list per chapter; a heading in capitals ends a chapter."""
    found: list[list[str]] = [[]]
    for paragraph in re.split(r"\n\s*\n", book):
        if is_prose(paragraph):
            flat = TITLES.sub(r"\1", " ".join(paragraph.split()))
            found[-1] += [sentence.strip() for sentence in SENTENCE.split(flat) if sentence.strip()]
        elif paragraph.strip() and found[-1] and paragraph.upper() == paragraph:
            found.append([])
    return [chapter for chapter in found if chapter]


def ask(sentence: str, small: frozenset[str]) -> Question | None:
    """The question that a sentence gives, or None; ``small`` are words that the book also writes in small letters.

    Example:
        >>> ask("One fine day in June a cat met Margery Daw.", frozenset({"cat"}))
        Question(prompt='One fine day in', answer='June')
        >>> ask("Then June came, and with her June.", frozenset()) is None
        True
    """
    for match in NAME.finditer(sentence):
        prompt, answer = sentence[: match.start()].rstrip(), match.group()
        names = not any(word.lower() in small for word in answer.split())
        if names and len(prompt.split()) >= FEWEST and not set(answer.split()) & set(re.findall(r"\w+", prompt)):
            return Question(prompt, answer)
    return None


def documents(book: str, size: Callable[[str], int], *, length: int) -> list[Document]:
    """Pack a book into documents of at most ``length`` tokens, in order, also those without a question."""
    small = frozenset(WORD.findall(book))
    packed: list[list[str]] = [[]]
    for chapter in chapters(book):
        packed.append([])
        for sentence in chapter:
            if size(sentence) > length:
                # what follows a dropped sentence is not consecutive with what precedes it
                packed.append([])
                continue
            if packed[-1] and size(" ".join([*packed[-1], sentence])) > length:
                packed.append([])
            packed[-1].append(sentence)
    return [
        Document(" ".join(part), tuple(found for sentence in part if (found := ask(sentence, small))))
        for part in packed
        if part
    ]


def split(
    books: Sequence[Sequence[Document]], *, validation: float = 0.15, test: float = 0.25
) -> list[tuple[Document, ...]]:
    """Cut each book into three runs of consecutive documents: the first's without a question, then of each those with.

    Shares are from 0 to 1.
    """
    parts: tuple[list[Document], list[Document], list[Document]] = ([], [], [])
    for book in books:
        last = len(book) - round(test * len(book))
        first = last - round(validation * len(book))
        for part, chosen in zip(parts, (book[:first], book[first:last], book[last:]), strict=True):
            part.extend(chosen)
    plain = tuple(document for document in parts[0] if not document.questions)
    return [plain, *(tuple(document for document in part if document.questions) for part in parts)]


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
    train: tuple[Document, ...]  # φ is learned on these
    validation: tuple[Document, ...]  # the rate of adapting is chosen on these
    test: tuple[Document, ...]  # looked at once
    elsewhere: tuple[Tensor, ...]  # other text for the locality term of meta-training; ids, (L,) each
    elsewhere_test: tuple[Tensor, ...]  # other text for measuring locality, not the same


def encode_question(lm: LanguageModel, question: Question) -> tuple[list[int], list[int], list[int]]:
    """Ids of a question alone, and of question and answer together: before the first token that is scored, and on."""
    prompt = lm.encode(question.prompt)
    # encoded together: an answer in mid-sentence has other tokens than at the beginning of a text
    both = lm.encode(f"{question.prompt} {question.answer}")
    # a token may hold the end of the question and the beginning of the answer: it is scored as a whole
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, both, strict=False)))
    why = "its answer has no token of its own, so nothing can be scored"
    own = "use the tokenizer that belongs to the model"
    require(shared < len(both), "model", f"the question {question.prompt!r}", why, own)
    return prompt, both[:shared], both[shared:]


def encode_questions(lm: LanguageModel, questions: Sequence[Question], *, context: int) -> Questions:
    """Questions as token ids; of one longer than ``context`` tokens the end is kept."""
    prompts: list[Tensor] = []
    texts: list[Tensor] = []
    rows: list[int] = []
    cols: list[int] = []
    for question in questions:
        prompt, before, answer = encode_question(lm, question)
        known = [lm.start, *before[-context:]]
        prompts.append(torch.tensor([lm.start, *prompt[-context:]]))
        texts.append(torch.tensor(known + answer))
        # the score of a token is read at the position before it
        rows += [len(texts) - 1] * len(answer)
        cols += range(len(known) - 1, len(known) + len(answer) - 1)
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
    plain, train, validation, test = split(made)
    other = passages(lm, elsewhere, length=length)
    got, why = f"{len(train)} documents with a question", "too few sentences of it name anything"
    require(bool(train and validation and test), "data", got, why, "pass longer books")
    got, why = f"{len(other)} passages of {length} tokens", "half is for meta-training, half for measuring"
    require(len(other) > 1, "elsewhere", got, why, "pass a longer text")
    half = len(other) // 2
    return Corpus(plain, train, validation, test, tuple(other[:half]), tuple(other[half:]))


def consecutive(
    parts: Sequence[Document], count: int, *, seed: int, labels: tuple[str | int, ...]
) -> tuple[Document, ...]:
    """``min(count, len(parts))`` consecutive documents from a place drawn by seed and labels."""
    last = max(1, len(parts) - count + 1)
    first = int(torch.randint(last, (1,), generator=stream(seed, *labels)))
    return tuple(parts[first : first + count])


def weight_spans(texts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(first, end) of each document's weights in ψ, which has one entry per token but the start tokens."""
    return list(pairwise(accumulate((len(text) - 1 for text in texts), initial=0)))
