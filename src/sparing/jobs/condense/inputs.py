"""The real images: training part, the part that rates are chosen by, and test, as numbers from 0 to 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.data import load_images
from sparing.errors import UserError
from sparing.seeds import stream

NAMES = {
    "fashion-mnist": ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}

Pair = tuple[Tensor, Tensor]  # images uint8 (N, channels, side, side) and labels int64 (N,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Three disjoint sets of real images; they stay bytes until they are used."""

    name: str  # of the data set
    train: Pair  # what the outer loss is drawn from
    held_out: Pair  # training images that rates are chosen by
    test: Pair  # what nothing is chosen by
    classes: tuple[str, ...]  # names, by label

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.train[0].shape[1]

    @property
    def side(self) -> int:
        """Height and width of an image (pixels)."""
        return self.train[0].shape[2]


def floats(images: Tensor) -> Tensor:
    """Bytes as numbers from 0 to 1, float32."""
    return images.float() / 255


def channels_first(images: Tensor) -> Tensor:
    """(N, channels, side, side) from gray (N, side, side) or color (N, side, side, channels)."""
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def split(images: Tensor, labels: Tensor, held_out: int) -> tuple[Pair, Pair]:
    """Set some training images aside, the same ones whatever the seed of the run."""
    if held_out >= len(images):
        why = f"there are {len(images)} training images"
        raise UserError("held_out", got=held_out, why=why, do="set fewer aside")
    # stream 0, not the run's: a rate chosen by one seed must not have seen the next seed's held-out images
    order = torch.randperm(len(images), generator=stream(0, "condense", "held out"))
    aside, rest = order[:held_out].sort().values, order[held_out:].sort().values
    return (images[rest], labels[rest]), (images[aside], labels[aside])


def gather(name: str, *, held_out: int) -> Inputs:
    """Load a data set, fetching it on first use."""
    images, labels = load_images(name, split="train")
    seen, unseen = load_images(name, split="test")
    train, aside = split(channels_first(images), labels, held_out)
    classes = NAMES.get(name, tuple(map(str, range(int(labels.max()) + 1))))
    return Inputs(name=name, train=train, held_out=aside, test=(channels_first(seen), unseen), classes=classes)


def draw(pair: Pair, count: int, generator: torch.Generator) -> Pair:
    """Some images as numbers from 0 to 1, and their labels, with replacement."""
    images, labels = pair
    chosen = torch.randint(len(images), (count,), generator=generator)
    return floats(images[chosen]), labels[chosen]
