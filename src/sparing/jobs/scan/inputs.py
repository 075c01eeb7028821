"""Rows to measure a model of a folder on: real images or text, prepared as the model expects them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sparing.errors import require
from sparing.jobs.lm.models import load_tokenizer, most_positions, vocabulary
from sparing.jobs.scan.checkpoints import Inputs, fill_, open_entry, read_weights
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.folders import folder_at, open_folder
from sparing.jobs.subjects.images import IMAGES, image_format_of, image_rows, prepared
from sparing.jobs.subjects.text import token_rows
from sparing.valley.evaluators import Classification, NextToken

BATCH: Final = 256  # calibration images in a batch (count)


def _of_images(settings: Settings, folder: Path, model: Any) -> Inputs:
    name = settings.data or "none"
    require(settings.data is not None, "data", name, "an image classifier needs images", f"pass one of {IMAGES}")
    train, test = image_rows(name, rows=settings.rows, calibration=settings.calibration)
    classes, most = int(model.config.num_labels), int(test[1].max()) + 1
    why = f"the model tells {classes} classes apart"
    require(classes >= most, "data", f"{name} with {most} classes", why, "pass the data it was trained for")
    image_format = image_format_of(folder, model.config)
    calibration = prepared(train[0], image_format)
    source = f"{len(test[0]):,} test images of {name}"
    source += "" if image_format.known else ", pixels from 0 to 1 (the folder names no mean and deviation)"
    evaluate = Classification(prepared(test[0], image_format), test[1])
    return Inputs(folder.name, model, evaluate, list(torch.split(calibration, BATCH)), "error", source)


def _of_text(settings: Settings, folder: Path, model: nn.Module) -> Inputs:
    name = settings.data or "none"
    do = "pass a .txt or .jsonl file, or alice"
    require(settings.data is not None, "data", name, "a language model needs text", do)
    limit = most_positions(model)
    fits = limit is None or settings.length <= limit
    require(fits, "length", settings.length, f"the model has {limit} positions", f"pass --length {limit} or less")
    tokens = token_rows(name, load_tokenizer(folder), rows=settings.rows, length=settings.length)
    known, highest = vocabulary(model), int(tokens.max())
    why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
    require(highest < known, "checkpoint", folder, why, "use the tokenizer that belongs to the model")
    source = f"{len(tokens):,} rows of {settings.length} tokens of {Path(name).name}"
    return Inputs(folder.name, model, NextToken(tokens), None, "loss", source)


def gather(settings: Settings) -> Inputs:
    """Open everything that a scan reads; nothing is written."""
    path = Path(settings.checkpoint)
    if settings.entry is not None:
        weights = read_weights(path)
        inputs = open_entry(settings.entry)
        fill_(inputs.model, weights, path)
        return inputs
    # A path may contain a colon, so an existing one wins over an entry point.
    if ":" in settings.checkpoint and not path.exists():
        return open_entry(settings.checkpoint)
    folder = folder_at(path)
    model, kind = open_folder(folder)
    return (_of_images if kind == "images" else _of_text)(settings, folder, model.eval())
