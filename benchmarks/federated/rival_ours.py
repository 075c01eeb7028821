"""``python -m benchmarks.federated.rival_ours loop|batched|workers``: this library's engines, one at a time."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from torch import nn

from benchmarks.federated import rivals
from sparing.federated import Client, Schedule, simulate
from sparing.federated.methods.fedavg import FedAvg


def train(engine: str, name: str) -> list[float]:
    """Whole rounds of FedAvg, with all that a row of the record measures; seconds between their ends."""
    stamps: list[float] = []

    def stamp(model: nn.Module) -> dict[str, float]:
        stamps.append(time.perf_counter())
        return {}

    clients = [Client(*rivals.rows_of(name, client)) for client in range(rivals.CLIENTS)]
    schedule = Schedule(
        rounds=rivals.ROUNDS, participation=rivals.COHORT / rivals.CLIENTS, local_epochs=rivals.EPOCHS,
        batch_size=rivals.BATCH, lr=rivals.RATE, weight_decay=1e-4,
    )  # fmt: skip
    make = functools.partial(rivals.net, name)
    kind: Any = engine
    simulate(make, clients, FedAvg(), schedule, engine=kind, workers=2, evaluate=stamp, members=False)
    return rivals.gaps(stamps)


if __name__ == "__main__":
    rivals.serve(functools.partial(train, sys.argv[1]))
