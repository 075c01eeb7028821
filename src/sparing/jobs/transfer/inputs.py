"""What is learnt from: scikit-learn's digits, or the tokens of a text, on the device once, and drawn by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.data import bundled_text
from sparing.errors import UserError
from sparing.jobs.lm.corpus import byte_pairs, encode, read_text
from sparing.jobs.transfer.settings import Transfer
from sparing.seeds import stream

WINDOWS, AT_ONCE = 128, 32  # held-out sequences, and those measured at once (count)


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
class Tokens:
    """A text as tokens, which may be its characters; its last tenth is held out."""

    train: Tensor  # (N,)
    held_out: Tensor  # windows that are not learned from, (windows, length + 1)
    length: int  # tokens in a sequence (count)
    outputs: int  # different tokens (count)

    def draws(self, steps: int, batch: int, seed: int) -> Tensor:
        """Starts of every sequence of a run, shape (steps, batch)."""
        most = len(self.train) - self.length
        return torch.randint(most, (steps, batch), generator=stream(seed, "transfer", "batches"))

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        """Mean cross-entropy (nat per token) of sequences given by their starts."""
        return self._loss(model, self.train[chosen[:, None] + torch.arange(self.length + 1)])

    def held_out_loss(self, model: nn.Module) -> Tensor:
        """Mean cross-entropy (nat per token) of the held-out windows."""
        parts = torch.split(self.held_out, AT_ONCE)
        return torch.stack([len(part) * self._loss(model, part) for part in parts]).sum() / len(self.held_out)

    def _loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


Inputs = Digits | Tokens


def gather(settings: Transfer) -> Inputs:
    """Read what a study learns from: the digits for the net, a text for language models."""
    if settings.family == "mlp":
        return digits()
    plain = settings.data in {"alice", "blake"}
    text = bundled_text(settings.data) if plain else read_text(settings.data, settings.first)  # type: ignore[arg-type]
    if settings.tokenizer == "char":
        return characters(text, settings.length)
    return pairs(text, settings.length, settings.vocabulary)


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


def characters(text: str, length: int) -> Tokens:
    """A text by character: its first nine tenths to learn from, and windows spread evenly over the rest."""
    letters = sorted(set(text))
    number = {letter: at for at, letter in enumerate(letters)}
    ids = torch.tensor([number[letter] for letter in text])
    cut = len(ids) * 9 // 10
    return _tokens(ids[:cut], ids[cut:], length, len(letters))


def pairs(text: str, length: int, vocabulary: int) -> Tokens:
    """A text by byte pairs that are learnt from its first nine tenths, which are what a model learns."""
    cut = len(text) * 9 // 10
    tokenizer = byte_pairs(text[:cut], vocabulary)
    train, rest = (encode(tokenizer, [part]) for part in (text[:cut], text[cut:]))
    return _tokens(train, rest, length, len(tokenizer))


def _tokens(train: Tensor, rest: Tensor, length: int, outputs: int) -> Tokens:
    """With windows spread evenly over the rest."""
    if len(rest) <= length + 1:
        do = "pass another --data, or a smaller --length"
        raise UserError("data", got=f"{len(rest)} held-out tokens", why="they hold no sequence", do=do)
    starts = torch.linspace(0, len(rest) - length - 1, WINDOWS).long()
    return Tokens(train, rest[starts[:, None] + torch.arange(length + 1)], length, outputs)
