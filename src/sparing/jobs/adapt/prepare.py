"""Everything before the first outer step: model, text, tuning, streams; the same for every method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparing.data import ASSETS, fetch, load_text
from sparing.errors import UserError
from sparing.jobs.adapt.corpus import BOOKS, ELSEWHERE, Corpus, build_corpus, consecutive, stream_of
from sparing.jobs.adapt.lm import LanguageModel, load_language_model
from sparing.jobs.adapt.problem import Window, make_window
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.tune import tune_
from sparing.jobs.disk import load_tensors, save_tensors

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


def _tune(lm: LanguageModel, data: Corpus, settings: Adapt, base: Path) -> LanguageModel:
    """θ₀, from ``base`` where it was made before."""
    if base.is_file():
        for name, value in load_tensors(base).items():
            lm.theta[name].copy_(value)
        return lm
    texts = [torch.tensor([lm.start, *lm.encode(document.text)]) for document in data.plain]
    # seed 0 whatever the run's seed: runs of all seeds compare on one θ₀
    lm = tune_(lm, texts, passes=settings.tune, lr=settings.tune_lr, seed=0)
    save_tensors(base, lm.theta)
    return lm


def streams(lm: LanguageModel, data: Corpus, settings: Adapt) -> tuple[Window, Window]:
    """The validation and the test stream of a seed: consecutive documents from places that the seed draws."""
    made = []
    for part, count, label in ((data.validation, settings.held, "validation"), (data.test, settings.stream, "test")):
        chosen = consecutive(part, count, seed=settings.seed, labels=(label,))
        made.append(make_window(lm, stream_of(lm, chosen, context=settings.context), data.elsewhere_test[:OTHER]))
    return made[0], made[1]


def prepare(settings: Adapt, base: Path) -> Inputs:
    """Open the model, cut the texts, tune; ``base`` is the file of the tuned θ₀, read where it exists, else written."""
    assets = {asset.name for asset in ASSETS if asset.kind == "model"}
    lm = load_language_model(fetch(settings.model) if settings.model in assets else Path(settings.model))
    books = [_text(path) for path in settings.books] or [load_text(name) for name in BOOKS]
    elsewhere = _text(settings.elsewhere) if settings.elsewhere else load_text(ELSEWHERE)
    data = build_corpus(lm, books, elsewhere, length=settings.length)
    lm = _tune(lm, data, settings, base)
    return Inputs(lm, data, *streams(lm, data, settings))
