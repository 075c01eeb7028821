"""What is measured, opened and checked before anything is written: records as each model's tokenizer cuts them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.disk import digest
from sparing.jobs.evaluate.harness import Task, read_task
from sparing.jobs.evaluate.losses import predicted
from sparing.jobs.evaluate.settings import Settings
from sparing.jobs.lm import models
from sparing.jobs.lm.files import Source, files_of, read
from sparing.jobs.lm.labels import IGNORED, Tokens, all_tokens
from sparing.jobs.lm.packing import pieces
from sparing.jobs.lm.records import Text
from sparing.jobs.torch_state import device_for


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A source as one tokenizer cuts it."""

    records: list[Tokens]
    left_out: int  # records that teach nothing (count)
    sizes: tuple[int, ...]  # bytes of each record where all are texts; else empty
    tokens: int  # of the text, so without a start token (count)
    dropped: int  # records whose prompt alone fills a row (count)
    cut: int  # tokens of answers beyond a row (count)

    @property
    def bytes(self) -> int:
        """Of all records, UTF-8; 0 where they are not texts."""
        return sum(self.sizes)


@dataclass(slots=True)
class Subject:
    """A model that is measured; its weights are in memory while it is."""

    label: str
    place: Path
    tokenizer: Any
    cuts: list[Cut]  # of each source
    settings: Settings
    _model: nn.Module | None = None

    @property
    def pad(self) -> int:
        """What fills a row."""
        return next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)

    @property
    def model(self) -> nn.Module:
        """The model, loaded when it is first asked for."""
        if self._model is None:
            how = {"dtype": getattr(torch, self.settings.dtype), "device": device_for(self.settings.device)}
            self._model = models.load_model(self.place, **how).eval()
            self._check(self._model)
        return self._model

    def forget_(self) -> None:
        """Free its weights."""
        self._model = None
        gc.collect()

    def _check(self, model: nn.Module) -> None:
        limit, length = models.most_positions(model), self.settings.length
        fits = limit is None or length <= limit
        require(fits, "length", length, f"{self.label} has {limit} positions", f"pass --length {limit} or less")
        known = models.vocabulary(model)
        highest = max((max(one.ids) for cut in self.cuts for one in cut.records), default=0)
        why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
        require(highest < known, "model", self.place, why, "use the tokenizer that belongs to the model")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Everything that is read."""

    subjects: list[Subject]
    sources: list[Source]
    tasks: list[Task]
    hashes: dict[str, Any]  # of every file


def gather(settings: Settings) -> Inputs:
    """Read and check everything but weights; nothing is written."""
    device_for(settings.device)
    tasks = [read_task(path) for path in settings.tasks]
    twice = next((one.name for at, one in enumerate(tasks) if one.name in {task.name for task in tasks[:at]}), None)
    require(twice is None, "tasks", twice, "two tasks have this name", "rename one of them")
    sources = [read(path, held_out=True) for path in settings.data]
    places = [settings.model, *([settings.against] if settings.against is not None else [])]
    for place in places:
        models.config_of(place)
    subjects = [_subject(label, place, sources, settings) for label, place in zip(labels(places), places, strict=True)]
    hashes = {
        "model": models.hash_folder(settings.model),
        "against": settings.against and models.hash_folder(settings.against),
        "data": [digest(file) for path in settings.data for file in files_of(path, held_out=True)],
        "tasks": [digest(file) for task in tasks for file in task.files],
    }
    return Inputs(subjects, sources, tasks, hashes)


def labels(places: Sequence[Path]) -> list[str]:
    """What models are called: by their folders, or by those of the runs that wrote them.

    Example:
        >>> labels([Path("runs/lisa/model"), Path("base")])
        ['lisa', 'base']
    """
    found = [
        place.resolve().parent.name if place.name == "model" and hub.name_of(place) is None else hub.title(place)
        for place in places
    ]
    return found if len(set(found)) == len(found) else [f"{one} ({at})" for at, one in enumerate(found, start=1)]


def _subject(label: str, place: Path, sources: Sequence[Source], settings: Settings) -> Subject:
    tokenizer = models.load_tokenizer(place)
    cuts = []
    for source in sources:
        refused: list[UserError] = list(source.left_out)
        records = all_tokens(tokenizer, source.examples, refused)
        if not records:
            raise refused[0]
        texts = [one.text for one in source.examples if isinstance(one, Text)]
        sizes = tuple(len(text.encode()) for text in texts) if len(texts) == len(records) else ()
        cuts.append(_cut(records, len(refused), sizes, tokenizer.bos_token_id, source.name, settings.length))
    return Subject(label, place, tokenizer, cuts, settings)


def _cut(
    records: list[Tokens], left_out: int, sizes: tuple[int, ...], start: int | None, name: str, length: int
) -> Cut:
    """Records with what rows of a length leave out of them; refused where that is everything."""
    dropped = sum(IGNORED in one.labels and not _held(one, length) for one in records)
    why = f"every prompt of {name} alone is as long as a row"
    require(dropped < len(records), "length", length, why, "pass a larger --length")
    whole, held = (sum(count) for count in zip(*((predicted(one), _held(one, length)) for one in records), strict=True))
    # a start token predicts, but is no part of the text
    tokens = sum(len(one.ids) - (start is not None and one.ids[0] == start) for one in records)
    return Cut(records, left_out, sizes, tokens, dropped, whole - held)


def _held(record: Tokens, length: int) -> int:
    """Predicted tokens of an answer that a row holds; of a text all, since it goes on in other rows."""
    return predicted(pieces(record, length)[0]) if IGNORED in record.labels else predicted(record)
