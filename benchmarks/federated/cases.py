"""Data, nets and schedules of the study; 100 clients of which ten train in a round, for five epochs of their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.federated import Client, Schedule, dirichlet
from sparing.federated.metrics import Accuracy
from sparing.jobs.federate.inputs import load_data
from sparing.seeds import stream

SEEDS, TUNING_SEEDS = range(5), (100, 101)
"""Seeds that are reported, and those by which settings were chosen."""

ALPHAS, TUNING_ALPHA = (10.0, 1.0, 0.5, 0.1), 0.5
CLIENTS, PARTICIPATION, EPOCHS = 100, 0.1, 5
LEAST = 8
"""Rows that every client has at least (count); batch norm can do little with fewer."""

HIDDEN = (64, 64)
"""Neurons of a perceptron's hidden layers (count)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the clients have, and what settings and methods are judged on; no row is in two parts."""

    inputs: Tensor
    targets: Tensor
    validation: Accuracy
    test: Accuracy
    classes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A data set and a net."""

    data: str
    net: str
    rounds: int
    rates: tuple[float, ...]
    """Six learning rates for FedAvg; the others get the middle three, with two strengths each."""
    batch: int = 64
    train: int | None = None
    """Rows of all clients together (count); None is all there are."""
    test: int | None = None
    """Test rows (count); None is all there are."""
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    every: int = 4
    """Rounds between evaluations."""

    @property
    def name(self) -> str:
        """Of rows and tables."""
        return f"{self.data} {self.net}"

    @property
    def rows(self) -> Rows:
        """Its data."""
        return rows_of(self.data, self.train, self.test)

    def schedule(self, lr: float, momentum: float = 0.9) -> Schedule:
        """What is the same for all methods, but for rate and momentum."""
        return Schedule(
            rounds=self.rounds, participation=PARTICIPATION, local_epochs=EPOCHS, batch_size=self.batch, lr=lr,
            momentum=momentum, weight_decay=1e-4, warmup_rounds=5,
        )  # fmt: skip

    def clients(self, alpha: float, seed: int) -> list[Client]:
        """The clients of a seed, the same for all methods."""
        rows = self.rows
        split = dirichlet(rows.targets, CLIENTS, alpha, rule="clients", seed=seed, least=LEAST)
        return [Client(rows.inputs[list(each)], rows.targets[list(each)]) for each in split.clients]

    def make_model(self) -> Callable[[], nn.Module]:
        """What makes the net."""
        rows = self.rows
        return functools.partial(NETS[self.net], tuple(rows.inputs.shape[1:]), rows.classes)


@functools.cache
def rows_of(data: str, train: int | None, test: int | None, held: int = 1000) -> Rows:
    """Rows of a data set, the same in every process and for all seeds."""
    share = 0.125 if data == "mnist-1d" else 0.05
    whole = load_data(data, seed=0, validation=share)
    order = torch.randperm(len(whole.targets), generator=stream(0, "rows", data))[:train].sort().values
    tested = torch.randperm(len(whole.test_targets), generator=stream(0, "test rows", data))[:test].sort().values
    return Rows(
        _small(whole.inputs[order]), whole.targets[order],
        Accuracy(_small(whole.validation_inputs[:held]), whole.validation_targets[:held]),
        Accuracy(_small(whole.test_inputs[tested]), whole.test_targets[tested]), whole.classes,
    )  # fmt: skip


def _small(inputs: Tensor) -> Tensor:
    """Images at half their height and width, by means of four pixels; signals as they are."""
    return functional.avg_pool2d(inputs, 2) if inputs.ndim == 4 else inputs.contiguous()


def perceptron(shape: tuple[int, ...], classes: int, *, norm: bool = False) -> nn.Sequential:
    """Linear layers with ReLU, and batch norm before it if wanted; torch's own initial weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for into, out in pairwise((torch.Size(shape).numel(), *HIDDEN)):
        layers += [nn.Linear(into, out, bias=not norm), *([nn.BatchNorm1d(out)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], classes))


def convolutional(
    shape: tuple[int, ...], classes: int, widths: tuple[int, ...] = (16, 32, 32), strides: tuple[int, ...] = (2, 2, 2)
) -> nn.Sequential:
    """Convolutions with batch norm and ReLU, the mean over pixels, a linear classifier."""
    layers: list[nn.Module] = []
    for (into, out), stride in zip(pairwise((shape[0], *widths)), strides, strict=True):
        layers += [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class Residual(nn.Module):
    """A strided convolution, two residual blocks, the second at half the size, with group norm; a linear classifier."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16) -> None:
        """Make the layers; torch's own initial weights."""
        super().__init__()
        self.stem = _normed(shape[0], width, 2)
        self.first, self.first_out = _normed(width, width, 1), _normed(width, width, 1)
        self.second, self.second_out = _normed(width, 2 * width, 2), _normed(2 * width, 2 * width, 1)
        self.shortcut = nn.Conv2d(width, 2 * width, 1, 2, bias=False)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, shape (rows, classes)."""
        x = functional.relu(self.stem(inputs))
        x = functional.relu(x + self.first_out(functional.relu(self.first(x))))
        x = functional.relu(self.shortcut(x) + self.second_out(functional.relu(self.second(x))))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


def _normed(into: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.GroupNorm(4, out))


NETS: dict[str, Callable[..., nn.Module]] = {
    "MLP": perceptron, "MLP, BN": functools.partial(perceptron, norm=True), "CNN, BN": convolutional,
    "deep CNN, BN": functools.partial(convolutional, widths=(16, 32, 64, 64), strides=(2, 2, 2, 1)),
    "residual, GN": Residual,
}  # fmt: skip
LOW, HIGH = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2), (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
SIGNALS = Case(data="mnist-1d", net="MLP", rounds=80, rates=HIGH)
CASES = (
    SIGNALS,
    Case(data="fashion-mnist", net="MLP", rounds=40, batch=32, train=6000, test=2000, rates=LOW),
    Case(data="mnist-1d", net="MLP, BN", rounds=40, rates=LOW),
    Case(
        data="cifar10", net="CNN, BN", rounds=24, batch=32, train=8000, test=2000, rates=LOW, tuning_seeds=(100,),
    ),
)  # fmt: skip
