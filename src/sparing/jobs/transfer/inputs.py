"""What is learnt from: scikit-learn's digits, or the characters of a text, on the device once, and drawn by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.data import bundled_text, load_text
from sparing.errors import UserError
from sparing.jobs.transfer.settings import Transfer
from sparing.seeds import stream

WINDOWS = 32  # held-out sequences (count)


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of digits and their classes; a quarter is held out."""

    train: Tensor  # pixels, mean 0 and variance 1 over the training images, (N, 64)
    labels: Tensor  # classes, (N,)
    held_out: tuple[Tensor, Tensor]  # the same of images that are not learned from
    features: int = 64  # pixels of an image (count)
    outputs: int = 10  # classes (count)

    def draws(self, steps: int, batch: int, seed: int) -> Tensor:
        """Indices of every batch of a run, shape (steps, batch)."""
        return torch.randint(len(self.train), (steps, batch), generator=stream(seed, "transfer", "batches"))

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        """Mean cross-entropy (nat) of a batch given by index."""
        return F.cross_entropy(model(self.train[chosen]), self.labels[chosen])

    def held_out_loss(self, model: nn.Module) -> Tensor:
        """Mean cross-entropy (nat) of all held-out images."""
        images, labels = self.held_out
        return F.cross_entropy(model(images), labels)


@dataclass(frozen=True, slots=True)
class Characters:
    """A text as numbers; its last tenth is held out."""

    train: Tensor  # characters, (N,)
    held_out: Tensor  # windows that are not learned from, (windows, length + 1)
    length: int  # characters in a sequence (count)
    outputs: int  # different characters (count)

    def draws(self, steps: int, batch: int, seed: int) -> Tensor:
        """Starts of every sequence of a run, shape (steps, batch)."""
        most = len(self.train) - self.length
        return torch.randint(most, (steps, batch), generator=stream(seed, "transfer", "batches"))

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        """Mean cross-entropy (nat per character) of sequences given by their starts."""
        return self._loss(model, self.train[chosen[:, None] + torch.arange(self.length + 1)])

    def held_out_loss(self, model: nn.Module) -> Tensor:
        """Mean cross-entropy (nat per character) of the held-out windows."""
        return self._loss(model, self.held_out)

    def _loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


Inputs = Digits | Characters


def gather(settings: Transfer) -> Inputs:
    """Read what a study learns from: the digits for the net, characters for language models."""
    return digits() if settings.family == "mlp" else characters(_text(settings.data), settings.length)


def digits() -> Digits:
    """The 1,797 digits of scikit-learn, 8 × 8 pixels; the same split whatever the seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        do = "run: pip install scikit-learn; or pass --family gpt2"
        raise UserError("model", got="mlp", why="its digits come with scikit-learn", do=do) from None
    found = cast("Any", load_digits())
    images, labels = torch.from_numpy(found.data).float(), torch.from_numpy(found.target).long()
    # stream 0, not the run's: every seed is judged on the same images
    order = torch.randperm(len(images), generator=stream(0, "transfer", "held out"))
    aside, rest = order[: len(images) // 4], order[len(images) // 4 :]
    # of the training images alone: held-out ones must not leak into the scale
    mean, deviation = images[rest].mean(), images[rest].std()
    images = (images - mean) / deviation
    return Digits(images[rest], labels[rest], (images[aside], labels[aside]))


def characters(text: str, length: int) -> Characters:
    """A text by character: its first nine tenths to learn from, and windows spread evenly over the rest."""
    letters = sorted(set(text))
    number = {letter: at for at, letter in enumerate(letters)}
    ids = torch.tensor([number[letter] for letter in text])
    cut = len(ids) * 9 // 10
    rest = ids[cut:]
    if len(rest) <= length + 1:
        do = "pass another --data, or a smaller --length"
        raise UserError("data", got=f"{len(text)} characters", why="its last tenth holds no sequence", do=do)
    starts = torch.linspace(0, len(rest) - length - 1, WINDOWS).long()
    return Characters(ids[:cut], rest[starts[:, None] + torch.arange(length + 1)], length, len(letters))


def _text(name: str) -> str:
    return bundled_text(name) if name in {"alice", "blake"} else load_text(name, first=2_000_000)  # type: ignore[arg-type]
