"""What a method is judged by: the rate chosen on validation, the scores on the test stream, the weights themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sparing.jobs.adapt.corpus import weight_spans
from sparing.jobs.adapt.evaluate import adapt_model, best_rate, score, sweep
from sparing.jobs.adapt.lm import LanguageModel
from sparing.jobs.adapt.prepare import Inputs
from sparing.jobs.adapt.problem import Window
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import Phi, weigh

SHOWN = 6  # questions shown with their answers
OFTEN = 2  # times that a token occurs before its mean weight is listed


@torch.no_grad()
def stream_weights(phi: Phi, window: Window) -> Tensor:
    """Weights of a stream's tokens, shape (n,)."""
    return weigh(phi, window.features)


def evaluate_network(
    inputs: Inputs, phi: Phi, settings: Adapt
) -> tuple[dict[str, Any], list[dict[str, float]], list[str]]:
    """Choose a rate on validation, adapt once to the test stream: (scores, rows of the sweep, answers)."""
    tried = sweep(
        inputs.lm,
        stream_weights(phi, inputs.validation),
        inputs.validation,
        settings.rates,
        locality=settings.locality,
        clip=settings.inner_clip,
    )
    lr = best_rate(tried)
    theta = adapt_model(
        inputs.lm, stream_weights(phi, inputs.test), inputs.test.stream.texts, lr=lr, clip=settings.inner_clip
    )
    found, given = score(inputs.lm, theta, inputs.test)
    return {"lr": lr, **asdict(found)}, tried, given


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
    return [{"token": token, **{name: shares[name][at] for name in shares}} for at, token in enumerate(tokens)]


def sample_rows(window: Window, given: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Some questions with each method's answer: those any method gets right first, then by how much methods differ."""
    questions = window.stream.questions
    right = {name: [a == b for a, b in zip(said, questions.expected, strict=True)] for name, said in given.items()}
    # two stable sorts: the second key leads, the first decides among equals
    order = sorted(range(len(questions.expected)), key=lambda at: -len({said[at] for said in given.values()}))
    order.sort(key=lambda at: not any(marked[at] for marked in right.values()))
    return [
        {
            "prompt": questions.prompt_texts[at],
            "answer": questions.expected[at],
            **{name: said[at] for name, said in given.items()},
        }
        for at in order[:SHOWN]
    ]
