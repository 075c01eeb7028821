"""Images to measure a model on, prepared as it expects them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from sparing.data import load_images
from sparing.errors import UserError, require
from sparing.seeds import stream

IMAGES: Final = ("mnist", "fashion-mnist", "cifar10", "digits")
Pair = tuple[Tensor, Tensor]  # images uint8 (N, rows, columns[, 3]) and labels int64 (N,)


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """How a model wants its images."""

    side: int | None  # height and width (pixels); None for any
    channels: int
    mean: tuple[float, ...] = (0.0,)  # subtracted from each channel of pixels in [0, 1]
    deviation: tuple[float, ...] = (1.0,)  # divides each channel
    known: bool = False  # whether the folder says mean and deviation


def image_format_of(folder: Path, config: Any) -> ImageFormat:
    """Read side, channels, mean and deviation from a folder; pixels in [0, 1] without preprocessor_config.json."""
    side = getattr(config, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    channels, path = int(getattr(config, "num_channels", 3)), folder / "preprocessor_config.json"
    if not path.is_file():
        return ImageFormat(side, channels)
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if not plain.get("do_normalize", True):
            return ImageFormat(side, channels, known=True)
        return ImageFormat(side, channels, tuple(plain["image_mean"]), tuple(plain["image_std"]), known=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why, do = f"it has no usable image_mean and image_std ({error})", "save the image processor again"
        raise UserError("checkpoint", got=path, why=why, do=do) from None


def digits() -> tuple[Pair, Pair]:
    """Training and test part of the 1,797 digits of scikit-learn as bytes; a third is test, the same split always."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        do = "run: pip install scikit-learn; or pass --data mnist"
        raise UserError("data", got="digits", why="they come with scikit-learn", do=do) from None
    found: Any = load_digits()
    images = (torch.from_numpy(found.images) * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(found.target).long()
    train, test = digit_places(len(images))
    return (images[train], labels[train]), (images[test], labels[test])


def digit_places(count: int) -> tuple[Tensor, Tensor]:
    """Places among scikit-learn's digits of the training and the test part."""
    order = torch.randperm(count, generator=stream(0, "scan", "digits"))
    return order[count // 3 :], order[: count // 3]


def image_rows(name: str, *, rows: int, calibration: int) -> tuple[Pair, Pair]:
    """The first ``calibration`` training images and ``rows`` test images of a data set."""
    known = name in IMAGES
    require(known, "data", name, "it is no known set of images", f"pass one of {', '.join(IMAGES)}")
    train, test = digits() if name == "digits" else (load_images(name, split=part) for part in ("train", "test"))
    return (train[0][:calibration], train[1][:calibration]), (test[0][:rows], test[1][:rows])


def prepared(images: Tensor, image_format: ImageFormat) -> Tensor:
    """Images as a model expects them, float32, (N, channels, side, side): resized bilinearly, normalized."""
    pixels = images.float() / 255
    pixels = pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2)
    if pixels.shape[1] != image_format.channels:
        pixels = pixels.mean(1, keepdim=True).expand(-1, image_format.channels, -1, -1)
    if image_format.side is not None and pixels.shape[-1] != image_format.side:
        pixels = functional.interpolate(pixels, (image_format.side, image_format.side), mode="bilinear", antialias=True)
    mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (image_format.mean, image_format.deviation))
    return ((pixels - mean) / deviation).contiguous()


def inputs_of(images: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Images uint8 as float32 (N, 1 or 3, H, W), with mean 0 and standard deviation 1 of ``like`` in each channel."""
    pixels, model = (_channels_first(each) for each in (images, images if like is None else like))
    mean = model.mean((0, 2, 3), keepdim=True)
    return (pixels - mean) / model.std((0, 2, 3), keepdim=True)


def _channels_first(images: Tensor) -> Tensor:
    pixels = images.float() / 255
    return pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
