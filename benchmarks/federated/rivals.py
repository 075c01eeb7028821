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
    """The perceptron for signals of 40 points, or the convolutional net for images of 14 × 14."""
    torch.manual_seed(0)
    if name == "MLP":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10),
    )  # fmt: skip


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
