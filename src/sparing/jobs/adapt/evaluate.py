"""Adapting to a stream of documents, and answering the questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from sparing.jobs.adapt.corpus import Questions, weight_spans
from sparing.jobs.adapt.lm import LanguageModel, Theta, padded
from sparing.jobs.adapt.losses import answer_loss, divergence, document_loss
from sparing.jobs.adapt.problem import Window
from sparing.jobs.adapt.squad import answer_in, exact_match, f1
from sparing.vectors import norm


@dataclass(frozen=True, slots=True)
class Scores:
    """How well a model answers after adapting."""

    nll: float  # mean over answer tokens (nat/token)
    em: float  # exact match (%)
    f1: float  # of words (%)
    kl: float  # KL(p_θ₀ ‖ p_θ) on other text (nat/token)


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
def answers(lm: LanguageModel, theta: Theta, questions: Questions, *, most: int = 8, batch: int = 16) -> list[str]:
    """Greedy answers: up to ``most`` likeliest tokens, and the name or number at their head."""
    written: list[str] = []
    for at in range(0, len(questions.prompts), batch):
        texts = list(questions.prompts[at : at + batch])
        rows = torch.arange(len(texts))
        for _ in range(most):
            ends = torch.tensor([len(text) - 1 for text in texts])
            likeliest = lm.logits(theta, padded(texts), rows, ends).argmax(dim=-1)
            texts = [torch.cat([text, token[None]]) for text, token in zip(texts, likeliest, strict=True)]
        for text, prompt in zip(texts, questions.prompts[at : at + batch], strict=True):
            written.append(answer_in(_continuation(lm, text, len(prompt))))
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


def score(lm: LanguageModel, theta: Theta, window: Window) -> tuple[Scores, list[str]]:
    """Score a model on every question of a stream; also the answers that it gave."""
    given = answers(lm, theta, window.stream.questions)
    pairs = list(zip(given, window.stream.questions.expected, strict=True))
    nll, kl = losses(lm, theta, window)
    scores = [100 * sum(mark(*pair) for pair in pairs) / len(pairs) for mark in (exact_match, f1)]
    return Scores(nll, scores[0], scores[1], kl), given


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
