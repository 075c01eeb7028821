"""Documents and the questions asked about them, made from a book by a rule.

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

FEWEST = 4  # words that a question has at least

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


def lowercase_words(book: str) -> frozenset[str]:
    """The words that a book writes in small letters somewhere."""
    return frozenset(WORD.findall(book))


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
    small, packed = lowercase_words(book), []
    for chapter in chapters(book):
        packed += _pack(chapter, size, length)
    made = []
    for sentences in packed:
        questions = [ask(sentence, small) for sentence in sentences]
        made.append(Document(" ".join(sentences), tuple(question for question in questions if question)))
    return made


def _pack(sentences: Sequence[str], size: Callable[[str], int], length: int) -> list[list[str]]:
    """Fill documents with consecutive sentences."""
    packed: list[list[str]] = [[]]
    for sentence in sentences:
        if size(sentence) > length:
            # what follows a dropped sentence is not consecutive with what precedes it
            packed.append([])
            continue
        if packed[-1] and size(" ".join([*packed[-1], sentence])) > length:
            packed.append([])
        packed[-1].append(sentence)
    return [part for part in packed if part]


@dataclass(frozen=True, slots=True)
class Split:
    """Documents for learning the weights, for choosing rates, and for the final answer."""

    plain: tuple[Document, ...]  # beside the meta-train ones, but nothing can be asked about them
    train: tuple[Document, ...]  # φ is learned on these
    validation: tuple[Document, ...]  # the rate of adapting is chosen on these
    test: tuple[Document, ...]  # looked at once


def split(books: Sequence[Sequence[Document]], *, validation: float = 0.15, test: float = 0.25) -> Split:
    """Cut each book into three runs of consecutive documents and keep those with a question; shares from 0 to 1."""
    parts: tuple[list[Document], list[Document], list[Document]] = ([], [], [])
    for book in books:
        last = len(book) - round(test * len(book))
        first = last - round(validation * len(book))
        for part, chosen in zip(parts, (book[:first], book[first:last], book[last:]), strict=True):
            part.extend(chosen)
    plain = tuple(document for document in parts[0] if not document.questions)
    return Split(plain, *(tuple(document for document in part if document.questions) for part in parts))
