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
from sparing.jobs.lm import files
from sparing.jobs.lm.records import NothingToLearnError, Text, example
from sparing.jobs.schedule import rate
from sparing.jobs.subjects.images import digit_places, image_rows, inputs_of
from sparing.jobs.subjects.text import text_of
from sparing.seeds import stream

NAMES = {
    "fashion-mnist": ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}

LEAST = 4  # bytes of a row of text


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A training run, and the rows that it predicts."""

    run: hg.TrainingRun
    target: Callable[[Weights], Tensor]  # θ -> losses of the predictions, (k,)
    numbers: Tensor  # of each training row, its place in the data, (n,); see the help of `data`
    test_numbers: Tensor  # of each prediction, its place in the data, or in a test part of their own, (k,)
    train_words: list[str]  # label or text of each training row
    test_words: list[str]  # of each prediction
    train_images: Tensor | None = None  # (n, H, W) or (n, H, W, 3), 0 to 1
    test_images: Tensor | None = None  # of each prediction
    left_out: int = 0  # rows of a text that are too short to learn from (count)


def gather(settings: Settings) -> Inputs:
    """Read the rows, and describe the run."""
    return _images(settings) if settings.data in IMAGES else _text(settings)


def _training(settings: Settings, count: int, losses: Any, init: Weights) -> hg.TrainingRun:
    """The run over ``count`` rows, in an order that belongs to the seed; rows left over at an epoch's end are used."""
    # an epoch's last step may have fewer rows
    steps = max(1, round(settings.epochs * math.ceil(count / settings.rows_per_step)))
    batches: list[Tensor] = []
    while len(batches) < steps:
        order = torch.randperm(count, generator=stream(settings.seed, "attribute", "order", len(batches)))
        batches += torch.split(order, settings.rows_per_step)
    decay = lambda step: rate(step, peak=settings.peak, steps=steps)  # noqa: E731  a schedule is a function of one line
    chosen: Any = hg.SGD(lr=decay, momentum=0.9) if settings.optimizer == "sgd" else hg.AdamW(lr=decay)
    return hg.TrainingRun(losses=losses, rows=count, batches=batches[:steps], init=init, optimizer=chosen)


def _draw(settings: Settings, count: int) -> Tensor:
    """Numbers of the training rows, sorted."""
    require(
        count >= settings.rows_per_step,
        "data",
        f"{count} rows",
        f"a step takes {settings.rows_per_step}",
        "pass a smaller --batch",
    )
    order = torch.randperm(count, generator=stream(settings.seed, "attribute", "rows"))
    return order[: settings.train_rows].sort().values


def _check_predictions(settings: Settings, count: int) -> Tensor:
    most = max(settings.predictions)
    why = f"test rows are numbered 0 to {count - 1}"
    require(most < count, "predictions", most, why, "pass numbers of test rows")
    return torch.tensor(settings.predictions)


def _images(settings: Settings) -> Inputs:
    (images, labels), (test, wanted) = image_rows(settings.data, rows=10_000, calibration=60_000)
    numbers, asked = _draw(settings, len(images)), _check_predictions(settings, len(test))
    # mean and deviation of the training rows, so that a net sees what it would see without the others
    x, x_test = (inputs_of(part, like=images[numbers]).flatten(1) for part in (images[numbers], test[asked]))
    y, y_test, seen = labels[numbers], wanted[asked], images[numbers].float() / 255
    classes = int(labels.max()) + 1
    init = perceptron(settings.seed, inputs=x.shape[1], width=settings.width, classes=classes)

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        return functional.cross_entropy(logits(theta, x[rows], settings.activation), y[rows], reduction="none")

    def target(theta: Weights) -> Tensor:
        return functional.cross_entropy(logits(theta, x_test, settings.activation), y_test, reduction="none")

    names = NAMES.get(settings.data, tuple(map(str, range(classes))))
    test_numbers = asked
    if settings.data == "digits":
        places = digit_places(len(images) + len(test))
        numbers, test_numbers = places[0][numbers], places[1][asked]
    return Inputs(
        run=_training(settings, len(x), losses, init), target=target, numbers=numbers, test_numbers=test_numbers,
        train_words=[names[label] for label in y.tolist()], test_words=[names[label] for label in y_test.tolist()],
        train_images=seen, test_images=test[asked].float() / 255,
    )  # fmt: skip


def text_rows(name: str, setting: str = "data") -> list[str]:
    """Rows of a text in their order, short ones too: paragraphs of prose, or records of a file."""
    text = text_of(name)
    if text is not None:
        return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    do = "pass mnist, fashion-mnist, cifar10, digits, a .txt or .jsonl file, or a text that `sparing fetch` lists"
    path = Path(name)
    require(path.suffix in {".jsonl", ".json"}, setting, name, "it is neither images nor a text", do)
    rows = []
    for where, record in files.rows(path):
        # what `files.read` leaves out has a number too
        try:
            one = example(record, where, set())
        except NothingToLearnError:
            rows.append("")
            continue
        if not isinstance(one, Text):
            raise UserError(setting, got=where, why="it is no plain text", do='pass records {"text": …}')
        rows.append(one.text)
    return rows


def _long(setting: str, name: str, rows: list[str]) -> list[int]:
    """Numbers of the rows that are long enough, one or more."""
    found = [number for number, row in enumerate(rows) if len(row.encode()) >= LEAST]
    require(bool(found), setting, name, "it has no row of four bytes or more", "pass a text that has")
    return found


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
    rows = test_rows = text_rows(settings.data)
    kept = rest = _long("data", settings.data, rows)
    if settings.test is None:
        # a tenth, spread evenly; the same rows whatever the seed
        every = max(2, min(10, math.ceil(len(kept) / (max(settings.predictions) + 1))))
        aside, rest = kept[::every], [number for at, number in enumerate(kept) if at % every]
        why = "its only row of four bytes or more is the one that is predicted"
        require(bool(rest), "data", settings.data, why, "pass more text, or --test")
        test_numbers = torch.tensor(aside)[_check_predictions(settings, len(aside))]
    else:
        name = str(settings.test)
        test_rows = text_rows(name, "test")
        fine = set(_long("test", name, test_rows))
        test_numbers = _check_predictions(settings, len(test_rows))
        short = [number for number in settings.predictions if number not in fine]
        why = f"row {min(short, default=0)} of {settings.test.name} has fewer than four bytes"
        require(not short, "predictions", min(short, default=0), why, "pass numbers of longer rows")
    numbers = torch.tensor(rest)[_draw(settings, len(rest))]
    # what is shown is what is learnt: a row up to the cut, without a letter that is cut in two
    train, test = (
        [row.encode()[: settings.length].decode(errors="ignore") for row in part]
        for part in ([rows[at] for at in numbers.tolist()], [test_rows[at] for at in test_numbers.tolist()])
    )
    (ids, known), (test_ids, test_known) = (_encode(part, settings.length) for part in (train, test))
    init = language_model(settings.seed, width=settings.width, length=settings.length)

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        return row_losses(theta, ids[rows], known[rows], settings.activation)

    def target(theta: Weights) -> Tensor:
        return row_losses(theta, test_ids, test_known, settings.activation)

    return Inputs(
        run=_training(settings, len(train), losses, init), target=target, numbers=numbers, test_numbers=test_numbers,
        train_words=train, test_words=test, left_out=len(rows) - len(kept),
    )  # fmt: skip
