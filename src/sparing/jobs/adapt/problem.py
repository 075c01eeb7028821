"""Meta-learning token weights as a two-level problem.

Inner: one SGD step per document on its weighted loss, from θ₀, all weights of the model. Outer: the loss of answers at
θ_T plus c · KL(p_θ₀ ‖ p_θ_T) on other text. θ is reset to θ₀ for every window of T documents, so a hypergradient is
that of its whole window; nothing is carried from window to window, neither θ nor tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad import Bilevel
from sparing.hypergrad.optimizers import SGD
from sparing.jobs.adapt.corpus import Corpus, Stream, consecutive, stream_of, weight_spans
from sparing.jobs.adapt.lm import LanguageModel, Theta
from sparing.jobs.adapt.losses import answer_loss, divergence, document_loss, log_probabilities
from sparing.jobs.adapt.weights import Phi, features, weigh
from sparing.seeds import stream


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """T documents with everything that their problem needs."""

    stream: Stream  # documents and questions
    features: Tensor  # features of every token, (n, F); n is the size of the bottleneck
    elsewhere: tuple[Tensor, ...]  # other text
    before: Tensor  # log-probabilities of θ₀ there, (tokens, V)


def make_window(lm: LanguageModel, chosen: Stream, elsewhere: Sequence[Tensor]) -> Window:
    """Compute the parts that do not change with φ."""
    with torch.no_grad():
        before = log_probabilities(lm, lm.theta, elsewhere)
    return Window(chosen, features(lm, chosen.texts), tuple(elsewhere), before)


def draw_window(lm: LanguageModel, data: Corpus, step: int, *, documents: int, context: int, seed: int) -> Window:
    """The window of an outer step: T consecutive documents and a passage of other text, by (seed, step) alone."""
    chosen = consecutive(data.train, documents, seed=seed, labels=("window", step))
    other = int(torch.randint(len(data.elsewhere), (1,), generator=stream(seed, "elsewhere", step)))
    return make_window(lm, stream_of(lm, chosen, context=context), (data.elsewhere[other],))


def problem(
    lm: LanguageModel, window: Window, *, lr: float, locality: float, clip: float | None = None, bottleneck: bool = True
) -> Bilevel:
    """The two-level problem of a window; its φ is a weight network.

    With ``bottleneck`` the run sees φ through ψ(φ), the weights of all tokens; without, it computes each document's
    weights from φ. The hypergradient is the same; directions are drawn in the space of ψ or of φ.
    """
    spans = weight_spans(window.stream.texts)
    batches = [{"text": text, "span": span} for text, span in zip(window.stream.texts, spans, strict=True)]

    def inner(theta: Theta, psi: Any, batch: dict[str, Any]) -> Tensor:
        first, end = batch["span"]
        weights = psi[first:end] if bottleneck else weigh(psi, window.features[first:end])
        return document_loss(lm, theta, weights, batch["text"])

    def outer(theta: Theta, phi: Phi) -> Tensor:
        answers = answer_loss(lm, theta, window.stream.questions)
        return answers + locality * divergence(lm, theta, window.elsewhere, window.before)

    return Bilevel(
        inner=inner,
        outer=outer,
        # θ is reset for every window: nothing is carried between them, neither weights nor tangents
        init=lm.theta,
        optimizer=SGD(lr=lr, clip=clip),
        steps=len(batches),
        batches=batches,
        through=(lambda phi: weigh(phi, window.features)) if bottleneck else None,
    )
