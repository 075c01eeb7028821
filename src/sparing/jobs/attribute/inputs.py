"""The run that is replayed and the rows that it predicts: images with labels, or rows of a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparing import hypergrad as hg
from sparing.errors import UserError, require
from sparing.jobs.attribute.nets import BYTES, Weights, language_model, logits, perceptron, row_losses
from sparing.jobs.attribute.settings import IMAGES, Settings
from sparing.jobs.lm.files import read
from sparing.jobs.lm.records import Text
from sparing.jobs.schedule import rate
from sparing.jobs.subjects.images import image_rows, inputs_of
from sparing.jobs.subjects.text import text_of
from sparing.seeds import stream

NAMES = {
    "fashion-mnist": ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A training run, and the rows that it predicts."""

    run: hg.TrainingRun
    target: Callable[[Weights], Tensor]  # θ -> losses of the predictions, (k,)
    numbers: Tensor  # of each training row, its number in the data, (n,)
    train_words: list[str]  # label or text of each training row
    test_words: list[str]  # of each prediction
    train_images: Tensor | None = None  # (n, H, W) or (n, H, W, 3), 0 to 1
    test_images: Tensor | None = None  # of each prediction


def gather(settings: Settings) -> Inputs:
    """Read the rows, and describe the run."""
    return _images(settings) if settings.data in IMAGES else _text(settings)


def _training(settings: Settings, count: int, losses: Any, init: Weights) -> hg.TrainingRun:
    """The run over ``count`` rows, in an order that belongs to the seed; rows left over at an epoch's end are used."""
    # an epoch's last step may have fewer rows
    steps = max(1, round(settings.epochs * math.ceil(count / settings.batch)))
    batches: list[Tensor] = []
    while len(batches) < steps:
        order = torch.randperm(count, generator=stream(settings.seed, "attribute", "order", len(batches)))
        batches += torch.split(order, settings.batch)
    decay = lambda step: rate(step, peak=settings.lr, steps=steps)  # noqa: E731  a schedule is a function of one line
    chosen: Any = hg.SGD(lr=decay, momentum=0.9) if settings.optimizer == "sgd" else hg.AdamW(lr=decay)
    return hg.TrainingRun(losses=losses, rows=count, batches=batches[:steps], init=init, optimizer=chosen)


def _draw(settings: Settings, count: int) -> Tensor:
    """Numbers of the training rows, sorted."""
    require(
        count >= settings.batch, "data", f"{count} rows", f"a step takes {settings.batch}", "pass a smaller --batch"
    )
    order = torch.randperm(count, generator=stream(settings.seed, "attribute", "rows"))
    return order[: settings.train_rows].sort().values


def _check_predictions(settings: Settings, count: int) -> Tensor:
    most = max(settings.predictions)
    require(most < count, "predictions", most, f"there are {count} test rows, from 0", f"pass at most {count - 1}")
    return torch.tensor(settings.predictions)


def _images(settings: Settings) -> Inputs:
    (images, labels), (test, wanted) = image_rows(settings.data, rows=10_000, calibration=60_000)
    numbers, asked = _draw(settings, len(images)), _check_predictions(settings, len(test))
    # mean and deviation of the training rows, so that a net sees what it would see without the others
    x, x_test = (inputs_of(part, like=images[numbers]).flatten(1) for part in (images[numbers], test[asked]))
    y, y_test = labels[numbers], wanted[asked]
    classes = int(labels.max()) + 1
    init = perceptron(settings.seed, inputs=x.shape[1], width=settings.width, classes=classes)

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        return functional.cross_entropy(logits(theta, x[rows], settings.activation), y[rows], reduction="none")

    def target(theta: Weights) -> Tensor:
        return functional.cross_entropy(logits(theta, x_test, settings.activation), y_test, reduction="none")

    names = NAMES.get(settings.data, tuple(map(str, range(classes))))
    return Inputs(
        run=_training(settings, len(x), losses, init), target=target, numbers=numbers,
        train_words=[names[label] for label in y.tolist()], test_words=[names[label] for label in y_test.tolist()],
        train_images=images[numbers].float() / 255, test_images=test[asked].float() / 255,
    )  # fmt: skip


def paragraphs(name: str) -> list[str]:
    """Rows of a text: paragraphs of prose, or records of a file, those of four bytes and more."""
    text = text_of(name)
    if text is not None:
        rows = [" ".join(part.split()) for part in text.split("\n\n")]
    else:
        do = "pass mnist, fashion-mnist, cifar10, digits, a .txt or .jsonl file, or a text that `sparing fetch` lists"
        path = Path(name)
        require(path.suffix in {".jsonl", ".json"}, "data", name, "it is neither images nor a text", do)
        examples = read(path).examples
        other = next((one for one in examples if not isinstance(one, Text)), None)
        if other is not None:
            raise UserError("data", got=other.where, why="it is no plain text", do='pass records {"text": …}')
        rows = [one.text for one in examples if isinstance(one, Text)]
    return [row for row in rows if len(row.encode()) >= 4]


def _encode(rows: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Bytes of rows and which of them are there, both (n, length + 1); a row ends with a byte of its own."""
    ids = torch.full((len(rows), length + 1), BYTES - 1)
    known = torch.zeros(len(rows), length + 1, dtype=torch.bool)
    for at, row in enumerate(rows):
        cut = list(row.encode()[:length])
        ids[at, : len(cut)] = torch.tensor(cut)
        known[at, : len(cut) + 1] = True
    return ids, known


def _text(settings: Settings) -> Inputs:
    rows = paragraphs(settings.data)
    if settings.test is None:
        # a tenth, spread evenly; the same rows whatever the seed
        every = max(2, min(10, math.ceil(len(rows) / (max(settings.predictions) + 1))))
        aside = rows[::every]
        rest = [at for at in range(len(rows)) if at % every]
    else:
        aside, rest = paragraphs(str(settings.test)), list(range(len(rows)))
    asked = _check_predictions(settings, len(aside)).tolist()
    numbers = torch.tensor(rest)[_draw(settings, len(rest))]
    # what is shown is what is learnt: a row up to the cut, without a letter that is cut in two
    train, test = (
        [row.encode()[: settings.length].decode(errors="ignore") for row in part]
        for part in ([rows[at] for at in numbers.tolist()], [aside[at] for at in asked])
    )
    (ids, known), (test_ids, test_known) = (_encode(part, settings.length) for part in (train, test))
    init = language_model(settings.seed, width=settings.width, length=settings.length)

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        return row_losses(theta, ids[rows], known[rows], settings.activation)

    def target(theta: Weights) -> Tensor:
        return row_losses(theta, test_ids, test_known, settings.activation)

    made = _training(settings, len(train), losses, init)
    return Inputs(run=made, target=target, numbers=numbers, train_words=train, test_words=test)
