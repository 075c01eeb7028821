"""Adapting and answering, against loops written out."""

from __future__ import annotations

import math

import pytest
import torch

from sparing.jobs.adapt.corpus import Document, Question, encode_questions, stream_of
from sparing.jobs.adapt.evaluate import (
    adapt_model,
    answer_in,
    answers,
    best_rate,
    exact_match,
    f1,
    losses,
    name_weights,
    normalized,
    passage_rows,
    sample_rows,
    score,
    sweep,
    token_rows,
    token_texts,
)
from sparing.jobs.adapt.problem import make_window
from sparing.jobs.adapt.weights import START


@pytest.fixture
def window(lm, data):
    return make_window(lm, stream_of(lm, data.train[:3]), data.elsewhere_test[:2])


def test_one_pass_is_torch_sgd(lm, window):
    weights = torch.rand(len(window.features), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = adapt_model(lm, weights, window.stream.texts, lr=0.05)
    model, at = lm.scored.model, 0
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for text in window.stream.texts:
        cols = torch.arange(len(text) - 1)
        scores = lm.scored(text[None], torch.zeros_like(cols), cols)
        each = torch.nn.functional.cross_entropy(scores, text[1:], reduction="none")
        optimizer.zero_grad()
        (each * weights[at : at + len(cols)]).mean().backward()
        optimizer.step()
        at += len(cols)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_adapting_leaves_the_model_alone_and_helps(lm, window):
    before = {name: value.clone() for name, value in lm.theta.items()}
    weights = torch.full((len(window.features),), START, dtype=torch.float64)
    theta = adapt_model(lm, weights, window.stream.texts, lr=0.3)
    assert losses(lm, theta, window)[0] < losses(lm, lm.theta, window)[0]
    assert all(torch.equal(before[name], value) for name, value in lm.theta.items())


def test_greedy_answers_are_those_of_one_question_at_a_time(lm):
    questions = [Question("Off to the town of", "Rome"), Question("He met", "Ur"), Question("One day the cat", "X")]
    questions = encode_questions(lm, questions, context=99)
    together, alone = (answers(lm, lm.theta, questions, most=5, batch=batch) for batch in (3, 1))
    assert together == alone
    ids = questions.prompts[1]
    for _ in range(5):
        scores = lm.scored.model(input_ids=ids[None]).logits[0, -1]
        ids = torch.cat([ids, scores.argmax()[None]])
    written = bytes(token for token in ids[len(questions.prompts[1]) :].tolist() if token < 256).decode(
        "utf-8", "replace"
    )
    assert together[1] in written


def test_marks_of_a_model_that_knows_nothing(lm, window):
    found, given = score(lm, lm.theta, window)
    assert len(given) == len(window.stream.questions.expected)
    assert found["em"] == 0.0
    assert found["kl"] == pytest.approx(0.0, abs=1e-9)


def test_sweep_and_the_rate_it_gives(lm, window):
    weights = torch.full((len(window.features),), START, dtype=torch.float64)
    rows = sweep(lm, weights, window, (0.1, 0.3, 1e6), locality=0.5)
    assert rows[0]["objective"] == pytest.approx(rows[0]["nll"] + 0.5 * rows[0]["kl"])
    assert best_rate(rows) == min(rows[:2], key=lambda row: row["objective"])["lr"]


def test_a_rate_that_diverged_is_never_chosen():
    rows = [{"lr": 0.1, "objective": math.nan}, {"lr": 0.2, "objective": 3.0}, {"lr": 0.3, "objective": math.inf}]
    assert best_rate(rows) == 0.2
    assert best_rate(rows[:1]) == 0.1


def test_case_articles_and_punctuation_do_not_count():
    assert normalized("  The  Spanish-Hen, an\nEGG.") == ["spanishhen", "egg"]
    assert exact_match("the Mock Turtle!", "Mock turtle") == 1.0
    assert exact_match("Mock", "Mock turtle") == 0.0


@pytest.mark.parametrize(
    ("given", "expected", "score"),
    [("Buster Bear", "Buster Bear", 1.0), ("Buster", "Buster Bear", 2 / 3), ("Fox", "Bear", 0.0), ("", "Bear", 0.0)],
)
def test_f1(given, expected, score):
    assert f1(given, expected) == pytest.approx(score)


def test_repeated_words_count_once_each():
    assert f1("bear bear bear", "bear") == pytest.approx(0.5)  # precision 1/3, recall 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Peter Rabbit, who sat", "Peter Rabbit"), (" 12 hens", "12"), ("an old Bear", "an"),
        (" Half-Chick went", "Half-Chick"), ("", ""),
    ],
)  # fmt: skip
def test_the_answer_is_the_name_at_the_head(text, answer):
    assert answer_in(text) == answer


@pytest.fixture
def letters(lm, data):
    documents = [Document("abca", (Question("a b", "C"),)), Document("bca", (Question("b c", "A"),))]
    return make_window(lm, stream_of(lm, documents), data.elsewhere_test[:1])


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0])


def test_pieces_are_the_tokens_as_text(lm, letters):
    assert token_texts(lm, letters.stream.texts[0]) == ["a", "b", "c", "a"]


def test_mean_weights_by_token_relative_to_the_stream(lm, letters):
    rows = token_rows(lm, letters, WEIGHTS, count=1)
    assert [(row["end"], row["token"], row["times"]) for row in rows] == [("high", "c", 2), ("low", "a", 3)]
    assert rows[0]["weight"] == pytest.approx(3.0 / 2.0)
    assert rows[1]["weight"] == pytest.approx((4 / 3) / 2.0)


def test_weight_on_names_and_numbers_alone(lm):
    texts = ["he met Peter Rabbit and 12 hens", "nothing here"]
    encoded = tuple(torch.tensor([lm.start, *lm.encode(text)]) for text in texts)
    documents = [Document(texts[0], (Question("he met", "Peter Rabbit"),)), Document(texts[1], ())]
    window = make_window(lm, stream_of(lm, documents), encoded[:1])
    found = name_weights(lm, window)
    # a token is a byte: the letters, digits and inner blank of both names
    marked = [7 <= at < 19 or 24 <= at < 26 for at in range(len(texts[0]))] + [False] * len(texts[1])
    assert (found > 0).tolist() == marked
    assert found.mean().item() == pytest.approx(START)
    assert found[7].item() == found[24].item()


def test_one_document_token_by_token(lm, letters):
    rows = passage_rows(lm, letters, {"rgu": WEIGHTS}, number=1)
    assert [row["token"] for row in rows] == ["b", "c", "a"]
    assert [row["rgu"] for row in rows] == pytest.approx([1.0, 1.5, 1.0])


def test_samples_begin_with_those_that_some_method_answers(letters):
    rows = sample_rows(letters, {"base": ["x", "x"], "rgu": ["y", "A"]})
    assert [row["answer"] for row in rows] == ["A", "C"]
    assert rows[0] == {"prompt": "b c", "answer": "A", "base": "x", "rgu": "A"}
