"""Adapting to a stream of documents, answering the questions about it, and what a method is judged by.

Answers are marked as SQuAD does: exact match and F1 of words, of which case, punctuation and articles do not count.
Source: Rajpurkar et al. 2016 (arXiv:1606.05250), section 6.1.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from sparing.jobs.adapt.corpus import NAME, WRITTEN, Questions, weight_spans
from sparing.jobs.adapt.lm import LanguageModel, Theta, padded
from sparing.jobs.adapt.problem import Inputs, Window, answer_loss, divergence, document_loss
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import START, Phi, weigh
from sparing.vectors import norm


@torch.no_grad()
def adapt_model(
    lm: LanguageModel, weights: Tensor, texts: Sequence[Tensor], *, lr: float, clip: float | None = None
) -> dict[str, Tensor]:
    """θ_T after one pass over the documents: one SGD step each, its loss weighted by ``weights`` (Σ (L_t − 1),)."""
    theta = dict(lm.theta)
    for text, (first, end) in zip(texts, weight_spans(texts), strict=True):
        slope = grad(lambda now, part=weights[first:end], text=text: document_loss(lm, now, part, text))(theta)
        # torch's clip_grad_norm_ to the letter, so that meta-training and adapting clip alike
        size = 1.0 if clip is None else min(1.0, clip / (float(norm(slope)) + 1e-6))
        theta = {name: value - lr * size * slope[name] for name, value in theta.items()}
    return theta


@torch.no_grad()
def answers(
    lm: LanguageModel, theta: Theta, questions: Questions, *, most: int = WRITTEN, batch: int = 16
) -> list[str]:
    """Greedy answers: up to ``most`` likeliest tokens, and the name or number at their head."""
    written: list[str] = []
    for at in range(0, len(questions.prompts), batch):
        texts = list(questions.prompts[at : at + batch])
        rows = torch.arange(len(texts))
        for _ in range(most):
            ends = torch.tensor([len(text) - 1 for text in texts])
            likeliest = lm.logits(theta, padded(texts), rows, ends).argmax(dim=-1)
            texts = [torch.cat([text, token[None]]) for text, token in zip(texts, likeliest, strict=True)]
        prompts = questions.prompts[at : at + batch]
        written += [answer_in(_continuation(lm, text, len(p))) for text, p in zip(texts, prompts, strict=True)]
    return written


def _continuation(lm: LanguageModel, text: Tensor, prompt: int) -> str:
    """What was written after a prompt, cut where the model ended the text."""
    tokens = text.tolist()
    tail = tokens[prompt:]
    ended = {lm.start, lm.tokenizer.eos_token_id}
    kept = next((index for index, token in enumerate(tail) if token in ended), len(tail))
    # decoded together with the prompt: the first token of the answer alone would lose its blank
    whole: str = lm.tokenizer.decode(tokens[: prompt + kept], skip_special_tokens=True)
    return whole[len(lm.tokenizer.decode(tokens[:prompt], skip_special_tokens=True)) :]


@torch.no_grad()
def losses(lm: LanguageModel, theta: Theta, window: Window) -> tuple[float, float]:
    """The two parts of the outer loss: NLL of answers, KL on other text (nat/token)."""
    nll = answer_loss(lm, theta, window.stream.questions).item()
    return nll, divergence(lm, theta, window.elsewhere, window.before).item()


def score(lm: LanguageModel, theta: Theta, window: Window) -> tuple[dict[str, float], list[str]]:
    """Score a model on every question of a stream; also the answers that it gave.

    ``nll`` is the mean over answer tokens, ``kl`` KL(p_θ₀ ‖ p_θ) on other text (nat/token), ``em`` exact match and
    ``f1`` that of words (%).
    """
    given = answers(lm, theta, window.stream.questions)
    pairs = list(zip(given, window.stream.questions.expected, strict=True))
    nll, kl = losses(lm, theta, window)
    em, words = (100 * sum(mark(*pair) for pair in pairs) / len(pairs) for mark in (exact_match, f1))
    return {"nll": nll, "em": em, "f1": words, "kl": kl}, given


def sweep(
    lm: LanguageModel,
    weights: Tensor,
    window: Window,
    rates: Sequence[float],
    *,
    locality: float,
    clip: float | None = None,
) -> list[dict[str, float]]:
    """Adapt to a validation stream at several rates; a rate is chosen by objective = nll + locality · kl."""
    rows = []
    for lr in rates:
        nll, kl = losses(lm, adapt_model(lm, weights, window.stream.texts, lr=lr, clip=clip), window)
        rows.append({"lr": lr, "nll": nll, "kl": kl, "objective": nll + locality * kl})
    return rows


def best_rate(rows: Sequence[dict[str, float]]) -> float:
    """The rate of lowest objective; the lowest rate where all diverged."""
    # NaN is not below infinity, so a rate that diverged either way is out
    finite = [row for row in rows if row["objective"] < float("inf")]
    return min(finite, key=lambda row: row["objective"])["lr"] if finite else min(row["lr"] for row in rows)


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


SHOWN = 6  # questions shown with their answers
OFTEN = 2  # times that a token occurs before its mean weight is listed


@torch.no_grad()
def stream_weights(phi: Phi, window: Window) -> Tensor:
    """Weights of a stream's tokens, shape (n,)."""
    return weigh(phi, window.features)


def name_weights(lm: LanguageModel, window: Window) -> Tensor:
    """Weight on names and numbers alone, shape (n,): those that the rule of the questions knows; mean ``START``."""
    marks: list[float] = []
    for text in window.stream.texts:
        pieces = token_texts(lm, text)
        spans = [match.span() for match in NAME.finditer("".join(pieces))]
        ends = list(itertools.accumulate(map(len, pieces), initial=0))
        # the blank before a word is part of its token and of no name
        words = ((end - len(piece.lstrip()), end) for piece, end in zip(pieces, ends[1:], strict=True))
        marks += [float(any(first < b and a < end for a, b in spans)) for first, end in words]
    chosen = torch.tensor(marks, dtype=window.features.dtype)
    return chosen * (START / chosen.mean().clamp(min=1e-3))


def evaluate_weights(
    inputs: Inputs, weights_of: Callable[[Window], Tensor], settings: Adapt
) -> tuple[dict[str, Any], list[dict[str, float]], list[str]]:
    """Choose a rate on validation, adapt once to the test stream: (scores, rows of the sweep, answers)."""
    lm, known, test, clip = inputs.lm, inputs.validation, inputs.test, settings.inner_clip
    tried = sweep(lm, weights_of(known), known, settings.rates, locality=settings.locality, clip=clip)
    lr = best_rate(tried)
    theta = adapt_model(lm, weights_of(test), test.stream.texts, lr=lr, clip=clip)
    found, given = score(lm, theta, test)
    return {"lr": lr, **found}, tried, given


def token_texts(lm: LanguageModel, text: Tensor) -> list[str]:
    """The tokens of a document (L,) as text, without the start token; blanks stay where the text has them."""
    # decoded from the beginning each time: what a token reads as depends on those before it
    ids, found, before = text.tolist(), [], ""
    for end in range(2, len(ids) + 1):
        whole: str = lm.tokenizer.decode(ids[:end], skip_special_tokens=True)
        found.append(whole[len(before) :])
        before = whole
    return found


def token_rows(lm: LanguageModel, window: Window, weights: Tensor, *, count: int = 10) -> list[dict[str, Any]]:
    """The tokens of highest and lowest mean weight, ``count`` of each; a weight of 1 is the mean of the stream (n,)."""
    sums: dict[int, list[float]] = defaultdict(list)
    ids = torch.cat([text[1:] for text in window.stream.texts]).tolist()
    for token, weight in zip(ids, (weights / weights.mean()).tolist(), strict=True):
        sums[token].append(weight)
    means = sorted((sum(w) / len(w), token) for token, w in sums.items() if len(w) >= OFTEN)
    rows = [("high", pair) for pair in reversed(means[-count:])] + [("low", pair) for pair in means[:count]]
    return [
        {"end": end, "token": lm.tokenizer.decode([token]).strip() or "␣", "weight": mean, "times": len(sums[token])}
        for end, (mean, token) in rows
    ]


def passage_rows(
    lm: LanguageModel, window: Window, weights: dict[str, Tensor], *, number: int = 0
) -> list[dict[str, Any]]:
    """One document token by token, with its weights (n,) under every method relative to the stream's mean."""
    first, end = weight_spans(window.stream.texts)[number]
    shares = {name: (value / value.mean())[first:end].tolist() for name, value in weights.items()}
    tokens = token_texts(lm, window.stream.texts[number])
    return [{"token": token, **{name: share[at] for name, share in shares.items()}} for at, token in enumerate(tokens)]


def sample_rows(window: Window, given: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Some questions with each method's answer: those any method gets right first, then by how much methods differ."""
    questions = window.stream.questions
    right = {name: [a == b for a, b in zip(said, questions.expected, strict=True)] for name, said in given.items()}
    # two stable sorts: the second key leads, the first decides among equals
    order = sorted(range(len(questions.expected)), key=lambda at: -len({said[at] for said in given.values()}))
    order.sort(key=lambda at: not any(marked[at] for marked in right.values()))
    return [
        {"prompt": questions.prompt_texts[at], "answer": questions.expected[at]}
        | {name: said[at] for name, said in given.items()}
        for at in order[:SHOWN]
    ]
