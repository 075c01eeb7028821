"""Meta-learning token weights as a two-level problem.

Inner: one SGD step per document on its weighted loss, from θ₀, all weights of the model. Outer: the loss of answers at
θ_T plus c · KL(p_θ₀ ‖ p_θ_T) on other text. θ is reset to θ₀ for every window of T documents, so a hypergradient is
that of its whole window; nothing is carried from window to window, neither θ nor tangents.

All losses are means over real tokens: a loss names the positions that count, so padding never enters, and every method
has the same ratio of answers to locality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.data import ASSETS, fetch, load_text
from sparing.errors import UserError, require
from sparing.hypergrad import Bilevel
from sparing.hypergrad.optimizers import SGD
from sparing.jobs.adapt.corpus import (
    BOOKS,
    ELSEWHERE,
    WRITTEN,
    Corpus,
    Document,
    Questions,
    Stream,
    build_corpus,
    consecutive,
    encode_question,
    stream_of,
    weight_spans,
)
from sparing.jobs.adapt.lm import LanguageModel, Theta, as_functions, padded, positions, tune_
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import Phi, features, weigh
from sparing.jobs.disk import load_tensors, save_tensors
from sparing.jobs.lm.models import load_model, load_tokenizer, most_positions
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
        init=lm.theta,
        optimizer=SGD(lr=lr, clip=clip),
        steps=len(batches),
        batches=batches,
        through=(lambda phi: weigh(phi, window.features)) if bottleneck else None,
    )


def document_loss(lm: LanguageModel, theta: Theta, weights: Tensor, text: Tensor) -> Tensor:
    """Mean over t of w_t · NLL_t, the inner loss; ``weights`` (L − 1,) are of all but the start of ``text`` (L,)."""
    cols = torch.arange(len(text) - 1)
    return (weights * lm.nll(theta, text[None], torch.zeros_like(cols), cols)).mean()


def answer_loss(lm: LanguageModel, theta: Theta, questions: Questions) -> Tensor:
    """Mean NLL over all answer tokens (nat/token)."""
    return lm.nll(theta, questions.ids, questions.rows, questions.cols).mean()


def log_probabilities(lm: LanguageModel, theta: Theta, texts: Sequence[Tensor]) -> Tensor:
    """Shape (Σ (L_i − 1), V): what a model expects after every token of texts (L_i,)."""
    return torch.log_softmax(lm.logits(theta, padded(texts), *positions(texts)), dim=-1)


def divergence(lm: LanguageModel, theta: Theta, texts: Sequence[Tensor], before: Tensor) -> Tensor:
    """KL(p_θ₀ ‖ p_θ) on other text (nat/token), mean over tokens; ``before`` is ``log_probabilities`` under θ₀."""
    return (before.exp() * (before - log_probabilities(lm, theta, texts))).sum(dim=-1).mean()


OTHER = 4  # passages of other text that locality is measured on


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What all methods share."""

    lm: LanguageModel  # with its θ₀
    data: Corpus
    validation: Window  # rates are chosen on it
    test: Window  # looked at once


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("text", got=path, why=f"it cannot be read ({error})", do="pass a UTF-8 text file") from None


def streams(lm: LanguageModel, data: Corpus, settings: Adapt) -> tuple[Window, Window]:
    """The validation and the test stream of a seed: consecutive documents from places that the seed draws."""

    def window(part: Sequence[Document], count: int, label: str) -> Window:
        chosen = consecutive(part, count, seed=settings.seed, labels=(label,))
        return make_window(lm, stream_of(lm, chosen, context=settings.question_length), data.elsewhere_test[:OTHER])

    validation = window(data.validation, settings.held_out_documents, "validation")
    return validation, window(data.test, settings.stream, "test")


def load(settings: Adapt) -> tuple[LanguageModel, Corpus]:
    """Open the model and cut the texts; nothing is written."""
    assets = {asset.name for asset in ASSETS if asset.kind == "model"}
    folder = fetch(settings.model) if settings.model in assets else Path(settings.model)
    model = load_model(folder, dtype=torch.float32)
    most = most_positions(model)
    fits = most is None or settings.length <= most
    require(fits, "length", settings.length, f"the model has {most} positions", "pass fewer")
    lm = as_functions(model, load_tokenizer(folder))
    books = [_text(path) for path in settings.data] or [load_text(name) for name in BOOKS]
    elsewhere = _text(settings.elsewhere) if settings.elsewhere else load_text(ELSEWHERE)
    data = build_corpus(lm, books, elsewhere, length=settings.length)
    if most is not None:
        check_question_length(lm, data, settings.question_length, most)
    check_counts(data, settings)
    return lm, data


def check_question_length(lm: LanguageModel, data: Corpus, size: int, most: int) -> None:
    """Refuse questions that leave too few positions for their start, and for the answer that is scored or written."""
    documents = (*data.train, *data.validation, *data.test)
    answers = [encode_question(lm, question)[2] for document in documents for question in document.questions]
    # the last token that is written is not read any more
    more = max(1 + max(map(len, answers)), WRITTEN)
    why = f"the model has {most} positions, and the start of a question and its answer take up to {more}"
    do = f"pass at most {most - more}" if most > more else "pass a model of more positions"
    require(size + more <= most, "question_length", size, why, do)


def check_counts(data: Corpus, settings: Adapt) -> None:
    """Refuse to promise more documents than there are; a default takes what there is, and the record says how much."""
    parts = {"documents": data.train, "held_out_documents": data.validation, "stream": data.test}
    names = {"documents": "meta-training", "held_out_documents": "validation", "stream": "test"}
    for name, part in parts.items():
        value = getattr(settings, name)
        fits = value <= len(part) or value == getattr(type(settings), name)
        why, do = f"the {names[name]} part has {len(part)} documents with a question", "pass at most that many"
        require(fits, name, value, why, do)
    tunable = bool(data.plain) or settings.tune in {0, type(settings).tune}
    why = "every document of the first part has a question, and none is left to tune on"
    require(tunable, "tune", settings.tune, why, "pass --tune 0, or longer books")


def count_rows(data: Corpus, settings: Adapt) -> list[dict[str, Any]]:
    """How many documents each part has, and how many of them a run takes."""
    return [
        {"part": part, "there": len(documents), "taken": min(asked, len(documents))}
        for part, documents, asked in (
            ("tuning, without a question", data.plain, len(data.plain) if settings.tune else 0),
            ("a window of meta-training", data.train, settings.documents),
            ("validation stream", data.validation, settings.held_out_documents),
            ("test stream", data.test, settings.stream),
        )
    ]


def prepare(lm: LanguageModel, data: Corpus, settings: Adapt, base: Path) -> Inputs:
    """Tune, and cut the streams; ``base`` is the file of the tuned θ₀, read where it exists, else written."""
    if base.is_file():
        for name, value in load_tensors(base).items():
            lm.theta[name].copy_(value)
    else:
        texts = [torch.tensor([lm.start, *lm.encode(document.text)]) for document in data.plain]
        # seed 0 whatever the run's seed: runs of all seeds compare on one θ₀
        lm = tune_(lm, texts, passes=settings.tune, lr=settings.tune_lr, seed=0)
        save_tensors(base, lm.theta)
    return Inputs(lm, data, *streams(lm, data, settings))
