"""How answers are marked: exact match and F1 of words, as SQuAD does.

Source: Rajpurkar et al. 2016 (arXiv:1606.05250), section 6.1: case, punctuation and articles do not count.
"""

from __future__ import annotations

import re
import string
from collections import Counter

LEAD = re.compile(r"[A-Z][\w'-]*(?: [A-Z][\w'-]*)*|\d[\d,]*")


def normalized(answer: str) -> list[str]:
    """The words of an answer that count: small letters, no punctuation, no articles.

    Example:
        >>> normalized("The Spanish Hen!")
        ['spanish', 'hen']
    """
    plain = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(given: str, expected: str) -> float:
    """Exact match, 1.0 or 0.0."""
    return float(normalized(given) == normalized(expected))


def f1(given: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words; where either has no words, whether both have none.

    Example:
        >>> round(f1("Buster Bear", "the old Bear"), 3)
        0.5
    """
    left, right = normalized(given), normalized(expected)
    shared = sum((Counter(left) & Counter(right)).values())
    if not left or not right:
        return float(left == right)
    return 2 * shared / (len(left) + len(right))


def answer_in(continuation: str) -> str:
    """The name or number at the head of what a model wrote, or else its first word.

    Example:
        >>> answer_in(" Peter Rabbit and then"), answer_in(" an old Bear")
        ('Peter Rabbit', 'an')
    """
    text = continuation.strip()
    found = LEAD.match(text)
    return found.group() if found else " ".join(text.split()[:1])
