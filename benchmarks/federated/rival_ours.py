"""``python -m benchmarks.federated.rival_ours loop|batched|workers``: this library's engines, one at a time."""

from __future__ import annotations

import functools
import sys

from benchmarks.federated import rivals
from sparing.federated import Client, Schedule, simulate
from sparing.federated.fedavg import FedAvg


def train(engine: str, name: str) -> list[float]:
    """Rounds of FedAvg; seconds of training and averaging."""
    clients = [Client(*rivals.rows_of(name, client)) for client in range(rivals.CLIENTS)]
    schedule = Schedule(
        rounds=rivals.ROUNDS, participation=rivals.COHORT / rivals.CLIENTS, local_epochs=rivals.EPOCHS,
        batch_size=rivals.BATCH, lr=rivals.RATE, weight_decay=1e-4,
    )  # fmt: skip
    make = functools.partial(rivals.net, name)
    run = simulate(make, clients, FedAvg(), schedule, engine=engine, workers=2)  # type: ignore[arg-type]
    return [row["seconds"] for row in run.record[rivals.WARM :]]


if __name__ == "__main__":
    rivals.serve(functools.partial(train, sys.argv[1]))
