"""``python -m benchmarks.federated.rival_ours ENGINE [EVERY]``: this library's engines, one at a time.

ENGINE is loop, batched, workers, or vmap, which is batched without its own layers; the weights are measured in every
EVERY-th round.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.federated import rivals
from sparing.federated import Client, Schedule, simulate
from sparing.federated.engines import batched
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Update, Vector


@dataclass(frozen=True, slots=True)
class Stamped(FedAvg):
    """FedAvg that notes when the server's step of each round ends; a measurement falls into the next gap."""

    stamps: list[float] = field(default_factory=list, repr=False)

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Combine, as the last part of a step."""
        combined = FedAvg.buffers(self, global_buffers, updates)
        self.stamps.append(time.perf_counter())
        return combined


def train(engine: str, every: int, name: str) -> list[float]:
    """Whole rounds of FedAvg; seconds between their ends."""
    clients = [Client(*rivals.rows_of(name, client)) for client in range(rivals.CLIENTS)]
    schedule = Schedule(
        rounds=rivals.ROUNDS, participation=rivals.COHORT / rivals.CLIENTS, local_epochs=rivals.EPOCHS,
        batch_size=rivals.BATCH, lr=rivals.RATE, weight_decay=1e-4,
    )  # fmt: skip
    make: Any = functools.partial(rivals.net, name)
    if engine == "vmap":
        batched.why_not_layered = lambda *_: "vmap was asked for"
    kind: Any = "batched" if engine == "vmap" else engine
    method = Stamped()
    simulate(make, clients, method, schedule, engine=kind, workers=2, evaluate=nothing, every=every, members=False)
    return rivals.gaps(method.stamps)


def nothing(model: nn.Module) -> dict[str, float]:
    """Measure nothing of a model's outputs, as the rivals do."""
    return {}


if __name__ == "__main__":
    rivals.serve(functools.partial(train, sys.argv[1], int((sys.argv[2:] or ["4"])[0])))
