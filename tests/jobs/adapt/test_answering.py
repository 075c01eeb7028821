"""Tables about the learnt weights."""

from __future__ import annotations

import pytest
import torch

from sparing.jobs.adapt.answering import passage_rows, sample_rows, token_rows, token_texts
from sparing.jobs.adapt.corpus import stream_of
from sparing.jobs.adapt.documents import Document, Question
from sparing.jobs.adapt.problem import make_window


@pytest.fixture
def window(lm, data):
    documents = [Document("abca", (Question("a b", "C"),)), Document("bca", (Question("b c", "A"),))]
    return make_window(lm, stream_of(lm, documents), data.elsewhere_test[:1])


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0])


def test_pieces_are_the_tokens_as_text(lm, window):
    assert token_texts(lm, window.stream.texts[0]) == ["a", "b", "c", "a"]


def test_mean_weights_by_token_relative_to_the_stream(lm, window):
    rows = token_rows(lm, window, WEIGHTS, count=1)
    assert [(row["end"], row["token"], row["times"]) for row in rows] == [("high", "c", 2), ("low", "a", 3)]
    assert rows[0]["weight"] == pytest.approx(3.0 / 2.0)
    assert rows[1]["weight"] == pytest.approx((4 / 3) / 2.0)


def test_one_document_token_by_token(lm, window):
    rows = passage_rows(lm, window, {"rgu": WEIGHTS}, number=1)
    assert [row["token"] for row in rows] == ["b", "c", "a"]
    assert [row["rgu"] for row in rows] == pytest.approx([1.0, 1.5, 1.0])


def test_samples_begin_with_those_that_some_method_answers(window):
    rows = sample_rows(window, {"base": ["x", "x"], "rgu": ["y", "A"]})
    assert [row["answer"] for row in rows] == ["A", "C"]
    assert rows[0] == {"prompt": "b c", "answer": "A", "base": "x", "rgu": "A"}
