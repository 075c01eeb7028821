"""The rule that makes documents and questions."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.jobs.adapt.corpus import (
    Document,
    Question,
    ask,
    build_corpus,
    chapters,
    consecutive,
    documents,
    encode_questions,
    is_prose,
    passages,
    split,
    stream_of,
    weight_spans,
)


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


def test_documents_do_not_span_chapters(book):
    made = documents(book, len, length=10_000)
    assert len(made) == 2


def test_split_keeps_order_and_shares_nothing():
    docs = [Document(str(at), (Question("a b c d", "E"),) if at % 2 else ()) for at in range(40)]
    parts = split([docs], validation=0.25, test=0.25)
    runs = [range(0, 20, 2), range(1, 20, 2), range(21, 30, 2), range(31, 40, 2)]
    assert [[d.text for d in part] for part in parts] == [[str(at) for at in run] for run in runs]


def test_answer_positions_are_those_of_the_answer(lm):
    questions = encode_questions(lm, [Question("Off to", "Rome"), Question("He", "X")], context=99)
    assert questions.ids[questions.rows, questions.cols + 1].tolist() == [*b" Rome", *b" X"]
    assert [len(prompt) for prompt in questions.prompts] == [7, 3]  # the start token and the bytes
    assert questions.prompts[0].tolist() == [256, *b"Off to"]


def test_a_long_question_keeps_its_end(lm):
    questions = encode_questions(lm, [Question("Once he came to", "Rome")], context=4)
    assert questions.prompts[0].tolist() == [256, *b"e to"]
    assert questions.prompt_texts == ("Once he came to",)


def test_live_weights_leave_out_start_tokens_and_padding(lm):
    documents = [Document(text, (Question("a", "B"),)) for text in ("abc", "abcdef")]
    found = stream_of(lm, documents)
    assert weight_spans(found.texts) == [(0, 3), (3, 9)]


def test_passages_have_one_length(lm, book):
    assert {tuple(passage.shape) for passage in passages(lm, book, length=50)} == {(50,)}


def test_parts_share_no_text(data):
    other = {tuple(text.tolist()) for text in data.elsewhere} & {tuple(text.tolist()) for text in data.elsewhere_test}
    assert not other
    assert data.train
    assert data.test


def test_a_book_without_names_is_refused(lm):
    with pytest.raises(UserError, match="0 documents with a question"):
        build_corpus(lm, ["it rained. " * 30], "it rained. " * 30, length=50)


def test_runs_are_consecutive_and_fixed_by_seed(data):
    parts = tuple(range(50))
    one = consecutive(parts, 5, seed=1, labels=("window", 3))
    assert one == tuple(range(one[0], one[0] + 5))
    assert one == consecutive(parts, 5, seed=1, labels=("window", 3))
    assert len({consecutive(parts, 5, seed=1, labels=("window", step)) for step in range(20)}) > 5
    assert consecutive(parts, 99, seed=0, labels=("x",)) == parts


def test_ids_are_integers(lm, data):
    assert stream_of(lm, data.train[:2]).questions.ids.dtype == torch.int64


class Merging:
    """A language model's tokenizer whose pieces may hold a blank: the longest that fits, from the left."""

    start = 0

    def __init__(self, *pieces: str) -> None:
        self.pieces = sorted({*pieces, *"abcdefghijklmnopqrstuvwxyzJRO "}, key=lambda piece: (-len(piece), piece))

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            piece = next(piece for piece in self.pieces if text.startswith(piece))
            found.append(1 + self.pieces.index(piece))
            text = text[len(piece) :]
        return found

    def text(self, ids: torch.Tensor) -> str:
        return "".join(self.pieces[at - 1] for at in ids.tolist())


@pytest.mark.parametrize(
    ("pieces", "scored"),
    [
        ((" Julie",), " Julie"),
        (("in Julie", "day "), "in Julie"),
        (("day in Julie", "day in"), "day in Julie"),
        ((), " Julie"),
    ],
)
def test_tokens_that_hold_the_end_of_the_question_are_scored_whole(pieces, scored):
    lm = Merging(*pieces)
    made = encode_questions(lm, [Question("One fine day in", "Julie"), Question("a b c d", "Rome")], context=99)
    asked = made.rows == 0
    assert lm.text(made.ids[0, made.cols[asked] + 1]) == scored
    assert lm.text(made.ids[0, 1 : 1 + len(lm.encode("One fine day in Julie"))]) == "One fine day in Julie"
    assert lm.text(made.prompts[0][1:]) == "One fine day in"
    assert lm.text(made.ids[made.rows, made.cols + 1][~asked]) == " Rome"


def test_an_answer_without_a_token_of_its_own_is_refused(lm, monkeypatch):
    monkeypatch.setattr(type(lm), "encode", lambda self, text: list(text.split(" J")[0].encode()))
    with pytest.raises(UserError, match="its answer has no token of its own"):
        encode_questions(lm, [Question("One fine day in", "Julie")], context=99)
