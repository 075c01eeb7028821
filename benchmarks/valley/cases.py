"""The nets that are scanned: data, architecture, training, all by seed; trained once and kept in the cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparing.data import cache_directory, load_images
from sparing.jobs.subjects.images import inputs_of
from sparing.jobs.subjects.nets import Norm, ResNet, Scale, Training, Vgg, initialize, train
from sparing.seeds import stream

SEEDS = range(5)
TRAINING, VALIDATION, TEST, CALIBRATION = 5000, 1000, 1000, 256
"""Rows to train on, to choose by, to measure on, and (of the training rows) to re-estimate batch norm with."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs and classes of every part; no row is in two parts, but calibration rows are training rows."""

    inputs: Tensor
    targets: Tensor
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    others: tuple[Tensor, Tensor]
    """As many training rows again, for pretraining."""

    @property
    def calibration(self) -> list[Tensor]:
        """One batch."""
        return [self.inputs[:CALIBRATION]]


@functools.cache
def rows_of(data: str) -> Rows:
    """Rows of a data set, the same in every process."""
    (images, classes), (held, held_classes) = (load_images(data, split=split) for split in ("train", "test"))
    order = torch.randperm(len(images), generator=stream(0, "rows", data))
    tested = torch.randperm(len(held), generator=stream(0, "test rows", data))[:TEST]
    first, second, third = order[: 2 * TRAINING + VALIDATION].split([TRAINING, VALIDATION, TRAINING])

    def part(some: Tensor) -> Tensor:
        return inputs_of(some, like=images[first]).contiguous(memory_format=torch.channels_last)

    return Rows(
        part(images[first]), classes[first], (part(images[second]), classes[second]),
        (part(held[tested]), held_classes[tested]), (part(images[third]), classes[third]),
    )  # fmt: skip


@functools.cache
def whole_test(data: str) -> tuple[Tensor, Tensor]:
    """All test rows of a data set, as inputs and classes."""
    images, _ = load_images(data, split="train")
    held, classes = load_images(data, split="test")
    like = images[torch.randperm(len(images), generator=stream(0, "rows", data))[:TRAINING]]
    return inputs_of(held, like=like).contiguous(memory_format=torch.channels_last), classes


@dataclass(frozen=True, slots=True)
class Case:
    """A net and how it is trained."""

    net: str = "vgg"
    norm: Norm = "batch"
    data: str = "fashion-mnist"
    scale: Scale = "ones"
    training: Training = field(default_factory=Training)
    label: str = ""
    """What is varied, empty for the standard case."""
    wide: int = 1
    """How many times as many channels as in the standard case."""

    @property
    def name(self) -> str:
        """Of files and rows."""
        wide = "" if self.wide == 1 else f"x{self.wide}"
        parts = (self.net, self.norm, self.data, "" if self.scale == "ones" else self.scale, self.label, wide)
        return "-".join(part for part in parts if part)

    def fresh(self, seed: int) -> nn.Module:
        """The net with its initial weights."""
        make, widths = {"vgg": (Vgg, (8, 16, 32, 64)), "resnet": (ResNet, (8, 16, 32))}[self.net]
        build: Callable[[], nn.Module] = functools.partial(
            make, 3 if self.data == "cifar10" else 1, norm=self.norm, widths=tuple(self.wide * each for each in widths)
        )
        return initialize(build, seed=seed, scale=self.scale).to(memory_format=torch.channels_last)  # half the time

    def trained(self, seed: int) -> nn.Module:
        """The trained net, from the cache where it is there."""
        model = self.fresh(seed)
        rows = rows_of(self.data)
        return kept(
            f"{self.name}-{seed}",
            model,
            lambda: train(model, rows.inputs, rows.targets, self.training, seed=seed),
        )


def kept(name: str, model: nn.Module, make: Callable[[], object]) -> nn.Module:
    """Load the model's state from the cache, or make it (in place) and keep it."""
    path = folder() / f"{name}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
    else:
        make()
        part = path.with_suffix(f".{os.getpid()}")
        save_file({key: value.clone().contiguous() for key, value in model.state_dict().items()}, part)
        part.replace(path)
    return model.eval()


def folder() -> Path:
    """Where trained nets are kept."""
    path = cache_directory() / "benchmarks-valley"
    path.mkdir(parents=True, exist_ok=True)
    return path


STANDARD = Training()
SLOWER = replace(STANDARD, rate=0.02)
"""For nets without norm, which a rate of 0.05 now and then breaks."""
VGG, VGG_GROUP = Case("vgg", "batch"), Case("vgg", "group")
VGG_NONE = Case("vgg", "none", training=SLOWER)
RESNET_CIFAR = Case("resnet", "batch", "cifar10")
MAIN = (
    VGG,
    RESNET_CIFAR,
    VGG_NONE,
    Case("vgg", "batch", "mnist"),
    VGG_GROUP,
)
SCALES = tuple(replace(case, scale=scale) for case in (VGG, RESNET_CIFAR) for scale in ("ones", "uniform", "normal"))
VARIED = {
    "lr .1": replace(STANDARD, rate=0.1),
    "lr .01": replace(STANDARD, rate=0.01),
    "batch 16": replace(STANDARD, batch=16),
    "batch 512": replace(STANDARD, batch=512),
    "wd 2e-3": replace(STANDARD, weight_decay=2e-3),
    "wd 1e-5": replace(STANDARD, weight_decay=1e-5),
}
LONG = Case(training=replace(STANDARD, batch=512, epochs=25, rate=0.2), label="batch_512_long")
"""To the training loss of batches of 16: epochs and rate were chosen on a seed that is not reported."""
HYPER = tuple(Case(training=training, label=label.replace(" ", "_")) for label, training in VARIED.items())
