"""Everything before the first outer step: model, text, tuning, streams; the same for every method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparing.data import ASSETS, fetch, load_text
from sparing.errors import UserError
from sparing.jobs.adapt.lm import Language, open_language
from sparing.jobs.adapt.materials import BOOKS, ELSEWHERE, Materials, materials, run_of, stream_of
from sparing.jobs.adapt.problem import Window, window_of
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.tune import tuned_
from sparing.jobs.disk import load_tensors, save_tensors

OTHER = 4  # passages of other text that locality is measured on


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """What all methods share."""

    lm: Language  # with its θ₀
    data: Materials
    validation: Window  # rates are chosen on it
    test: Window  # looked at once


def _model_at(name: str) -> Path:
    """A directory as it is, an asset from the cache."""
    return fetch(name) if name in {asset.name for asset in ASSETS if asset.kind == "model"} else Path(name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("text", got=path, why=f"it cannot be read ({error})", do="pass a UTF-8 text file") from None


def _tuned(lm: Language, data: Materials, settings: Adapt, base: Path) -> Language:
    """θ₀, from ``base`` where it was made before."""
    if base.is_file():
        for name, value in load_tensors(base).items():
            lm.theta[name].copy_(value)
        return lm
    texts = [torch.tensor([lm.start, *lm.encode(document.text)]) for document in data.plain]
    lm = tuned_(lm, texts, passes=settings.tune, lr=settings.tune_lr, seed=0)
    save_tensors(base, lm.theta)
    return lm


def streams(lm: Language, data: Materials, settings: Adapt) -> tuple[Window, Window]:
    """The validation and the test stream of a seed: consecutive documents from places that the seed draws."""
    made = []
    for part, count, label in ((data.validation, settings.held, "validation"), (data.test, settings.stream, "test")):
        chosen = run_of(part, count, seed=settings.seed, labels=(label,))
        made.append(window_of(lm, stream_of(lm, chosen, context=settings.context), data.elsewhere_test[:OTHER]))
    return made[0], made[1]


def prepare(settings: Adapt, base: Path) -> Bench:
    """Open the model, cut the texts, tune; ``base`` is the file of the tuned θ₀, read where it exists, else written."""
    lm = open_language(_model_at(settings.model))
    books = [_text(path) for path in settings.books] or [load_text(name) for name in BOOKS]
    elsewhere = _text(settings.elsewhere) if settings.elsewhere else load_text(ELSEWHERE)
    data = materials(lm, books, elsewhere, length=settings.length)
    lm = _tuned(lm, data, settings, base)
    return Bench(lm, data, *streams(lm, data, settings))
