"""Bytes of a round, counted, where clients draw one, two or all of four blocks, with the accuracy beside them.

A residual perceptron on MNIST-1D, α = 0.5. The server sends whole models; clients send what they trained: the stem, the
head, and the blocks they drew. Each number of blocks has its own choice of six rates.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.federated import study
from benchmarks.federated.cases import SEEDS, SIGNALS, TUNING_ALPHA, TUNING_SEEDS
from benchmarks.federated.store import Store
from sparing.errors import RunError
from sparing.federated import simulate
from sparing.federated.methods.fedavg import FedAvg

CASE = dataclasses.replace(SIGNALS, rounds=40)
WIDTH, BLOCKS = 64, 4
DRAWN = (None, 2, 1)
"""Blocks that each client draws; None is all."""
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        """Begin small."""
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        result: Tensor = x + torch.relu(self.linear(x))
        return result


class Residual(nn.Module):
    """A stem, four equal blocks, a head."""

    def __init__(self, inputs: int, classes: int) -> None:
        """Take the numbers of a row and the classes (count)."""
        super().__init__()
        self.stem = nn.Linear(inputs, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (N, …) -> logits (N, classes)."""
        x = torch.relu(self.stem(x.flatten(1)))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def train(blocks: int | None, lr: float, seed: int) -> Mapping[str, Any]:
    """One run: bytes of a round each way, accuracy at the end, and bytes sent by each evaluation."""
    rows, tuning, began = CASE.rows, seed in TUNING_SEEDS, time.process_time()
    row = {"blocks": blocks, "lr": lr, "seed": seed, "on": "validation" if tuning else "test"}
    try:
        run = simulate(
            functools.partial(Residual, rows.inputs[0].numel(), rows.classes), CASE.clients(TUNING_ALPHA, seed),
            FedAvg(), dataclasses.replace(CASE.schedule(lr), blocks=blocks),
            evaluate=rows.validation if tuning else rows.test, every=CASE.every, seed=seed, members=False,
            engine="loop",
        )  # fmt: skip
    except RunError as error:
        return row | {"diverged": True, "why": str(error)[:80], "accuracy": 1 / rows.classes}
    sent = list(accumulate(each["bytes_up"] for each in run.record))
    curve = [[sent[each["round"] - 1], each["accuracy"]] for each in run.record if "accuracy" in each]
    return row | {
        "accuracy": fmean(accuracy for _, accuracy in curve[-study.LAST :]),
        "bytes_up": fmean(each["bytes_up"] for each in run.record),
        "bytes_down": fmean(each["bytes_down"] for each in run.record),
        "curve": [] if tuning else curve, "seconds": time.process_time() - began,
    }  # fmt: skip


def run(share: int, of: int) -> None:
    """Choose a rate for each number of blocks, then seed by seed."""
    store = Store("bytes")

    def one(blocks: int | None, lr: float, seed: int) -> dict[str, Any]:
        return store.once(f"{blocks or 'all'} {lr:g} {seed}", lambda: train(blocks, lr, seed))

    trials = [(blocks, lr, seed) for blocks in DRAWN for lr in RATES for seed in TUNING_SEEDS]
    for trial in trials[share::of]:
        one(*trial)
    best = {b: max(RATES, key=lambda lr: fmean(one(b, lr, s)["accuracy"] for s in TUNING_SEEDS)) for b in DRAWN}
    for seed, blocks in [(seed, blocks) for seed in SEEDS for blocks in DRAWN][share::of]:
        one(blocks, best[blocks], seed)
