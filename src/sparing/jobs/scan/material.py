"""Rows to measure a model of a folder on: real images or text, prepared as the model expects them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.data import ASSETS, bundled_text, load_images, load_text
from sparing.errors import UserError, require
from sparing.jobs.finetune.labels import tokens_of
from sparing.jobs.finetune.models import load_tokenizer, most_positions, vocabulary
from sparing.jobs.finetune.records import read_examples
from sparing.jobs.scan.checkpoints import Subject, fill_, folder_at, open_entry, open_folder, read_weights
from sparing.jobs.scan.settings import Settings
from sparing.seeds import stream
from sparing.valley.evaluators import Classification, NextToken

IMAGES: Final = ("mnist", "fashion-mnist", "cifar10", "digits")
BATCH: Final = 256
"""Calibration images in a batch (count)."""

Pair = tuple[Tensor, Tensor]
"""Images uint8 (N, rows, columns[, 3]) and labels int64 (N,)."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a model wants its images."""

    side: int | None
    """Height and width (pixels); None for any."""
    channels: int
    """Channels (count)."""
    mean: tuple[float, ...] = (0.0,)
    """Subtracted from each channel of pixels in [0, 1]."""
    deviation: tuple[float, ...] = (1.0,)
    """Divides each channel."""
    known: bool = False
    """Whether the folder says mean and deviation."""


def look_of(folder: Path, config: Any) -> Look:
    """Read what a folder says of its images.

    Args:
        folder: Of the model.
        config: Its configuration.

    Returns:
        Side, channels, mean and deviation; pixels in [0, 1] where preprocessor_config.json is missing.

    Raises:
        UserError: If that file is broken.
    """
    side = getattr(config, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    channels, path = int(getattr(config, "num_channels", 3)), folder / "preprocessor_config.json"
    if not path.is_file():
        return Look(side, channels)
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if not plain.get("do_normalize", True):
            return Look(side, channels, known=True)
        return Look(side, channels, tuple(plain["image_mean"]), tuple(plain["image_std"]), known=True)
    except (ValueError, KeyError, TypeError) as error:
        why, do = f"it has no usable image_mean and image_std ({error})", "save the image processor again"
        raise UserError("checkpoint", got=path, why=why, do=do) from None


def digits() -> tuple[Pair, Pair]:
    """The 1,797 digits of scikit-learn as bytes; a third is the test part.

    Returns:
        Training and test part, the same split always.

    Raises:
        UserError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        do = "run: pip install scikit-learn; or pass --data mnist"
        raise UserError("data", got="digits", why="they come with scikit-learn", do=do) from None
    found: Any = load_digits()
    images = (torch.from_numpy(found.images) * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(images), generator=stream(0, "scan", "digits"))
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    return (images[train], labels[train]), (images[test], labels[test])


def image_rows(name: str, *, rows: int, calibration: int) -> tuple[Pair, Pair]:
    """The first images of both parts of a data set.

    Args:
        name: One of ``IMAGES``.
        rows: Test images (count).
        calibration: Training images (count).

    Returns:
        Training and test part.
    """
    known = name in IMAGES
    require(known, "data", name, "it is no known set of images", f"pass one of {', '.join(IMAGES)}")
    train, test = digits() if name == "digits" else (load_images(name, split=part) for part in ("train", "test"))
    return (train[0][:calibration], train[1][:calibration]), (test[0][:rows], test[1][:rows])


def prepared(images: Tensor, look: Look) -> Tensor:
    """Images as a model expects them.

    Args:
        images: uint8, shape (N, rows, columns) or (N, rows, columns, 3).
        look: Of the model.

    Returns:
        float32, shape (N, channels, side, side): grey repeated, sides resized bilinearly, channels normalised.
    """
    pixels = images.float() / 255
    pixels = pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2)
    if pixels.shape[1] != look.channels:
        pixels = pixels.mean(1, keepdim=True).expand(-1, look.channels, -1, -1)
    if look.side is not None and pixels.shape[-1] != look.side:
        pixels = functional.interpolate(pixels, (look.side, look.side), mode="bilinear", antialias=True)
    mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (look.mean, look.deviation))
    return ((pixels - mean) / deviation).contiguous()


def _of_images(settings: Settings, folder: Path, model: Any) -> Subject:
    name = settings.data or "none"
    require(settings.data is not None, "data", name, "an image classifier needs images", f"pass one of {IMAGES}")
    train, test = image_rows(name, rows=settings.rows, calibration=settings.calibration)
    classes, most = int(model.config.num_labels), int(test[1].max()) + 1
    why = f"the model tells {classes} classes apart"
    require(classes >= most, "data", f"{name} with {most} classes", why, "pass the data it was trained for")
    look = look_of(folder, model.config)
    inputs = prepared(train[0], look)
    source = f"{len(test[0]):,} test images of {name}"
    source += "" if look.known else ", pixels from 0 to 1 (the folder names no mean and deviation)"
    evaluate = Classification(prepared(test[0], look), test[1])
    return Subject(folder.name, model, evaluate, list(torch.split(inputs, BATCH)), "error", source)


def text_of(name: str) -> str | None:
    """A text by name, or from a .txt file.

    Args:
        name: "alice", "blake", a text asset, or a path.

    Returns:
        The text; None for a path of another kind.

    Raises:
        UserError: If the file is not UTF-8.
    """
    if name in {"alice", "blake"}:
        return bundled_text(name)  # type: ignore[arg-type]
    if any(asset.name == name and asset.kind == "text" for asset in ASSETS):
        return load_text(name, first=4_000_000)
    if Path(name).suffix != ".txt":
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise UserError("data", got=name, why=why, do="pass an existing .txt or .jsonl file") from None
    except UnicodeDecodeError as error:
        raise UserError("data", got=name, why=f"byte {error.start} is not UTF-8", do="save it as UTF-8") from None


def token_rows(name: str, tokenizer: Any, *, rows: int, length: int) -> Tensor:
    """Rows of tokens, spread evenly over a text.

    Args:
        name: As ``--data``.
        tokenizer: Of the model.
        rows: At most this many (count).
        length: Tokens in a row (count).

    Returns:
        Token ids, int64, shape (rows, length).

    Raises:
        UserError: If the text does not fill a row, or there is none.
    """
    text = text_of(name)
    if text is not None:
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        jsonl = Path(name).suffix in {".jsonl", ".json"}
        do = "pass a .txt or .jsonl file, or a text that `sparing fetch` lists"
        require(jsonl, "data", name, "it is no text", do)
        ids = [token for example in read_examples(Path(name)) for token in tokens_of(tokenizer, example).ids]
    count = len(ids) // length
    require(count >= 1, "data", f"{len(ids)} tokens", f"a row has {length}", "pass more text, or a smaller --length")
    whole = torch.tensor(ids[: count * length]).view(count, length)
    return whole[torch.linspace(0, count - 1, min(rows, count)).long()]


def _of_text(settings: Settings, folder: Path, model: nn.Module) -> Subject:
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
    return Subject(folder.name, model, NextToken(tokens), None, "loss", source)


def gather(settings: Settings) -> Subject:
    """Open everything that a scan reads; nothing is written.

    Args:
        settings: Of the scan.

    Returns:
        Model, measure and calibration batches.

    Raises:
        UserError: If something is missing, torn, foreign, or does not fit.
    """
    path = Path(settings.checkpoint)
    if settings.entry is not None:
        weights = read_weights(path)
        subject = open_entry(settings.entry)
        fill_(subject.model, weights, path)
        return subject
    if ":" in settings.checkpoint and not path.exists():
        return open_entry(settings.checkpoint)
    folder = folder_at(path)
    model, kind = open_folder(folder)
    return (_of_images if kind == "images" else _of_text)(settings, folder, model.eval())
