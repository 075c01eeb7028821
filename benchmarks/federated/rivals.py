"""What every speed measurement shares: nets, rows, local training, and how an arm is asked for rounds.

It needs torch alone, so that the interpreters of rivals, which have not this library, can read it. An arm is a process
that waits; for every line it receives it trains some rounds and answers with the seconds between their ends.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROUNDS, WARM = 12, 2
"""Rounds that an arm makes when asked, and how many at the start are not counted: processes start, caches fill."""

CLIENTS, COHORT, EPOCHS, BATCH, RATE = 100, 10, 5, 32, 0.05
FOLDER = "SPARING_SPEED_ROWS"
"""Environment variable: where the rows of the clients lie."""


def net(name: str) -> nn.Sequential:
    """A net of ``NETS``, from the same draw."""
    torch.manual_seed(0)
    return NETS[name]()


def perceptron() -> nn.Sequential:
    """For signals of 40 points."""
    return nn.Sequential(nn.Flatten(), nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutional(channels: int, width: int, side: int) -> nn.Sequential:
    """Two convolutions with pooling, for square images."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Take channels (count) and the stride of the first convolution."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        return functional.relu(self.layers(x) + self.shortcut(x))


def residual(width: int, blocks: int = 1) -> nn.Sequential:
    """A residual net for images of 32 × 32: stages of blocks at 1, 2 and 4 times the width; three is ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    into = width
    for stage in range(3):
        for block in range(blocks):
            out = width * 2**stage
            layers.append(Block(into, out, 2 if stage and not block else 1))
            into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))


def group_normed(model: nn.Sequential) -> nn.Sequential:
    """Put group norm in the place of batch norm."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    return model


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "MLP": perceptron,
    "CNN": lambda: convolutional(1, 8, 14),
    "ResNet": lambda: residual(16),
    "ResNet-20": lambda: residual(16, 3),
    "ResNet-20, GN": lambda: group_normed(residual(16, 3)),
    "CNN, 32 × 32": lambda: convolutional(3, 16, 32),
    "ResNet, narrow": lambda: residual(4),
}
"""The first two are for rows of MNIST-1D and images of 14 × 14, the others for images of 3 × 32 × 32."""


@functools.cache
def rows_of(name: str, client: int) -> tuple[Tensor, Tensor]:
    """The rows of a client."""
    tensors = torch.load(Path(os.environ[FOLDER]) / f"{name}.{client}.pt", weights_only=True)
    return tensors["inputs"], tensors["targets"]


def write_rows(folder: Path, name: str, clients: list[tuple[Tensor, Tensor]]) -> None:
    """Lay the clients' rows where the arms find them."""
    for at, (inputs, targets) in enumerate(clients):
        torch.save({"inputs": inputs.clone(), "targets": targets.clone()}, folder / f"{name}.{at}.pt")


def plain_round(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Local training as a tutorial has it: torch's SGD, five epochs of shuffled batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(targets)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()


def serve(train: Callable[[str], list[float]]) -> None:
    """Answer every line on the standard input, the name of a net, with seconds by round."""
    torch.set_num_threads(1)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print goes elsewhere
    answer.write(json.dumps(_about()) + "\n")
    answer.flush()
    for line in sys.stdin:
        answer.write(json.dumps(train(line.strip())) + "\n")
        answer.flush()


def gaps(stamps: list[float]) -> list[float]:
    """Seconds between the ends of rounds, the first few left out."""
    return [b - a for a, b in zip(stamps[WARM:], stamps[WARM + 1 :], strict=False)]


def _about() -> dict[str, Any]:
    return {"python": sys.version.split()[0], "torch": torch.__version__}
