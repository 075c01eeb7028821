"""Token ids of documents and questions; real tokens only."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.jobs.adapt.corpus import build_corpus, consecutive, encode_questions, passages, stream_of, weight_spans
from sparing.jobs.adapt.documents import Document, Question


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
