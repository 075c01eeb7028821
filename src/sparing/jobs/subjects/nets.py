"""Small convolutional nets with batch norm, group norm or none, and the plain training they get.

Scans need nets whose weights are wholly known: every initial number and every batch comes from the seed, so a net is
its description and a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.seeds import stream

Norm = Literal["batch", "group", "none"]
Scale = Literal["ones", "uniform", "normal"]

_Model = TypeVar("_Model", bound=nn.Module)
_CHANNELS_PER_GROUP = 8


class Unit(nn.Module):
    """A 3 × 3 convolution and its norm; without norm the convolution has a bias."""

    def __init__(self, inputs: int, outputs: int, *, norm: Norm, stride: int = 1) -> None:
        """Take the numbers of channels (count), the norm and the stride (pixels)."""
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=norm == "none")
        self.norm: nn.Module = nn.BatchNorm2d(outputs) if norm == "batch" else nn.Identity()
        if norm == "group":
            self.norm = nn.GroupNorm(outputs // _CHANNELS_PER_GROUP, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        result: Tensor = self.norm(self.conv(x))
        return result


class Residual(nn.Module):
    """Two units and a short cut: parameter-free, every second pixel and zeros for new channels (He et al. 2016, A)."""

    def __init__(self, inputs: int, outputs: int, *, norm: Norm, stride: int) -> None:
        """Take the numbers of channels (count), the norm and the stride (pixels)."""
        super().__init__()
        self.first = Unit(inputs, outputs, norm=norm, stride=stride)
        self.second = Unit(outputs, outputs, norm=norm)
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        branch = self.second(functional.relu(self.first(x)))
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))
        return functional.relu(branch + short)


class Vgg(nn.Module):
    """Units, each with a ReLU and all but the last with 2 × 2 pooling, then the mean over pixels and a classifier."""

    def __init__(self, channels: int, *, norm: Norm = "batch", widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        """Take the images' channels (count), the norm, and the channels of each unit (count)."""
        super().__init__()
        sizes = zip((channels, *widths[:-1]), widths, strict=True)
        self.layers = nn.ModuleList(Unit(inputs, outputs, norm=norm) for inputs, outputs in sizes)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, channels, H, W) -> logits (N, 10)."""
        for index, layer in enumerate(self.layers):
            x = functional.relu(layer(functional.max_pool2d(x, 2) if index else x))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class ResNet(nn.Module):
    """A strided unit, residual blocks that halve the image from the second on, the mean over pixels, a classifier."""

    def __init__(self, channels: int, *, norm: Norm = "batch", widths: tuple[int, ...] = (8, 16, 32)) -> None:
        """Take the images' channels (count), the norm, and the channels of each block (count)."""
        super().__init__()
        self.stem = Unit(channels, widths[0], norm=norm, stride=2)
        sizes = enumerate(zip((widths[0], *widths[:-1]), widths, strict=True))
        self.layers = nn.ModuleList(
            Residual(inputs, outputs, norm=norm, stride=2 if index else 1) for index, (inputs, outputs) in sizes
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, channels, H, W) -> logits (N, 10)."""
        x = functional.relu(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Stochastic gradient descent with momentum and a cosine to zero; no augmentation."""

    epochs: int = 8  # passes over the rows (count)
    batch: int = 64  # rows of a step (count); the rows left over at an epoch's end are dropped
    rate: float = 0.05  # learning rate at the start (per step)
    momentum: float = 0.9  # share of the last step kept
    weight_decay: float = 5e-4  # L2 coefficient on every parameter, as in the paper
    warmup: float = 0.05  # share of the steps in which the rate rises from zero, linearly

    def __post_init__(self) -> None:
        """Reject settings that cannot train."""
        if min(self.epochs, self.batch) < 1 or self.rate <= 0:
            raise ValueError(f"Training needs epochs >= 1, batch >= 1 and rate > 0, got {self}")


def initialize(build: Callable[[], _Model], *, seed: int, scale: Scale = "ones") -> _Model:
    """Return a net with the initial weights of a seed, float32, in training mode.

    Matrices are normal with variance 2 / fan-in (He et al. 2015), the classifier's 1 / fan-in; biases are zero.
    ``scale``: weights of the norms: ones, uniform in (0, 1), or normal with deviation 0.1 (paper, §1.9 and Fig. 7).
    """
    # Built without storage, so that the constructor's own draws cost nothing and touch no generator.
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, module in model.named_modules():
            # A stream for each name: another width or depth leaves the other layers' weights as they were.
            _fill_(module, stream(seed, "initial", name), scale)
    return model


def train(
    model: _Model,
    inputs: Tensor,
    targets: Tensor,
    settings: Training,
    *,
    seed: int,
    after_epoch: Callable[[int, _Model], None] | None = None,
) -> _Model:
    """Train a net in place to the same bits for the same model, rows, settings, seed and thread count.

    ``after_epoch`` gets the number of epochs done and the model, in evaluation mode.
    """
    steps = len(inputs) // settings.batch
    if steps == 0:
        raise ValueError(f"train: need at least {settings.batch} rows for one batch, got {len(inputs)}")
    optimizer = torch.optim.SGD(
        model.parameters(), settings.rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    for epoch in range(settings.epochs):
        model.train()
        order = torch.randperm(len(inputs), generator=stream(seed, "order", epoch))
        for step, rows in enumerate(torch.split(order[: steps * settings.batch], settings.batch)):
            share = rate_at((epoch * steps + step) / (settings.epochs * steps), warmup=settings.warmup)
            optimizer.param_groups[0]["lr"] = settings.rate * share
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        if after_epoch is not None:
            after_epoch(epoch + 1, model)
    return model


def rate_at(done: float, *, warmup: float) -> float:
    """Learning rate as a share of its peak: linear warm-up, then (1 + cos πt) / 2 with t the share of the rest."""
    if done < warmup:
        return done / warmup
    return (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))) / 2


def _fill_(module: nn.Module, generator: torch.Generator, scale: Scale) -> None:
    """Fill what a module holds itself; a module without parameters is left alone."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        gain = 2.0 if isinstance(module, nn.Conv2d) else 1.0
        module.weight.normal_(0, math.sqrt(gain / module.weight[0].numel()), generator=generator)
    elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
        module.weight.fill_(1.0)
        if scale == "uniform":
            module.weight.uniform_(0, 1, generator=generator)
        elif scale == "normal":
            module.weight.normal_(0, 0.1, generator=generator)
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        bias.zero_()
