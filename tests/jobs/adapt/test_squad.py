"""Marks of answers, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from sparing.jobs.adapt.squad import answer_in, exact_match, f1, normalized


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
