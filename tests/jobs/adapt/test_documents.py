"""The rule that makes documents and questions."""

from __future__ import annotations

import pytest

from sparing.jobs.adapt.documents import Document as Doc
from sparing.jobs.adapt.documents import Question, ask, chapters, documents, is_prose, lowercase_words, split


def test_headings_verse_and_pictures_are_left_out(book):
    text = " ".join(sentence for chapter in chapters(book) for sentence in chapter)
    assert "CHAPTER" not in text
    assert "Green jacket" not in text
    assert not is_prose("[Illustration: A hen]")
    assert len(chapters(book)) == 2


def test_a_title_does_not_end_a_sentence():
    assert chapters("Then old Mr. Fox came. He sat down.") == [["Then old Mr Fox came.", "He sat down."]]


@pytest.mark.parametrize(
    ("sentence", "answer"),
    [
        ("After a while they came to Toledo.", "Toledo"),
        ("In the town he had 12 hens.", "12"),
        ("There was once a king of Great Britain here.", "Great Britain"),
        ("Margery went to the well.", None),  # the name begins the sentence
        ("He met Margery.", None),  # too short a question
        ("One fine day they saw Queen go by.", None),  # a word that the book also writes small
        ("To Madrid and back and to Madrid again he went.", None),  # named before
    ],
)
def test_what_a_sentence_asks(sentence, answer):
    found = ask(sentence, frozenset({"queen"}))
    assert (found and found.answer) == answer
    if found:
        assert sentence.startswith(found.prompt)
        assert found.answer not in found.prompt


def test_documents_fit_and_say_what_is_asked(book):
    made = documents(book, len, length=100)
    assert max(len(document.text) for document in made) <= 100
    for document in made:
        for question in document.questions:
            assert f"{question.prompt} {question.answer}" in document.text
    assert "the" in lowercase_words(book)


def test_documents_do_not_span_chapters(book):
    made = documents(book, len, length=10_000)
    assert len(made) == 2


def test_split_keeps_order_and_shares_nothing():
    docs = [Doc(str(at), (Question("a b c d", "E"),) if at % 2 else ()) for at in range(40)]
    parts = split([docs], validation=0.25, test=0.25)
    assert [d.text for d in parts.train] == [str(at) for at in range(1, 20, 2)]
    assert [d.text for d in parts.plain] == [str(at) for at in range(0, 20, 2)]
    assert [d.text for d in parts.validation] == [str(at) for at in range(21, 30, 2)]
    assert [d.text for d in parts.test] == [str(at) for at in range(31, 40, 2)]
