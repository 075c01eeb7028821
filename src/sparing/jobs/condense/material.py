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
"""Short names of classes; digits are their own."""

Pair = tuple[Tensor, Tensor]
"""Images uint8 (N, channels, side, side) and labels int64 (N,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Three disjoint sets of real images; they stay bytes until they are used."""

    name: str
    """Name of the data set."""
    train: Pair
    """What the outer loss is drawn from."""
    held_out: Pair
    """Training images that rates are chosen by."""
    test: Pair
    """What nothing is chosen by."""
    classes: tuple[str, ...]
    """Names of the classes, by label."""

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
    """Give grey images a channel, put that of colour images before the sides.

    Args:
        images: Shape (N, side, side) or (N, side, side, channels).

    Returns:
        Shape (N, channels, side, side).
    """
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def split(images: Tensor, labels: Tensor, held_out: int) -> tuple[Pair, Pair]:
    """Set some training images aside, the same ones whatever the seed of the run.

    Args:
        images: All training images.
        labels: Theirs.
        held_out: How many to set aside (count).

    Returns:
        The rest, and those set aside.

    Raises:
        UserError: If nothing would be left to learn from.
    """
    if held_out >= len(images):
        why = f"there are {len(images)} training images"
        raise UserError("held_out", got=held_out, why=why, do="set fewer aside")
    order = torch.randperm(len(images), generator=stream(0, "condense", "held out"))
    aside, rest = order[:held_out].sort().values, order[held_out:].sort().values
    return (images[rest], labels[rest]), (images[aside], labels[aside])


def gather(name: str, *, held_out: int) -> Material:
    """Load a data set, fetching it on first use.

    Args:
        name: An image asset of ten classes.
        held_out: Training images to set aside (count).

    Returns:
        Its three parts.
    """
    images, labels = load_images(name, split="train")
    seen, unseen = load_images(name, split="test")
    train, aside = split(channels_first(images), labels, held_out)
    classes = NAMES.get(name, tuple(map(str, range(int(labels.max()) + 1))))
    return Material(name=name, train=train, held_out=aside, test=(channels_first(seen), unseen), classes=classes)


def draw(pair: Pair, count: int, generator: torch.Generator) -> Pair:
    """Some images and their labels, with replacement.

    Args:
        pair: Where from.
        count: How many.
        generator: Where the numbers come from.

    Returns:
        Images as numbers from 0 to 1, and labels.
    """
    images, labels = pair
    chosen = torch.randint(len(images), (count,), generator=generator)
    return floats(images[chosen]), labels[chosen]
