"""``python -m benchmarks.federated.rival_flower grid|ray``: an app as Flower's tutorial has it.

``ray`` is Flower's simulation; ``grid`` calls the same app and strategy in one process, through this library's grid.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import warnings
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine is slow to start it; not in the times
warnings.simplefilter("ignore")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402

from benchmarks.federated import rivals  # noqa: E402


def client_app(name: str) -> ClientApp:
    """Train what came, send it back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = rivals.net(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, targets = rivals.rows_of(name, int(context.node_config["partition-id"]))
        rivals.plain_round(model, inputs, targets)
        metrics = MetricRecord({"num-examples": len(targets)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def rounds(grid: Grid, name: str) -> list[float]:
    """Flower's FedAvg; when each round ended."""
    stamps: list[float] = []

    def stamp(number: int, arrays: Any) -> None:
        if number:
            stamps.append(time.perf_counter())

    strategy = FedAvg(
        fraction_train=rivals.COHORT / rivals.CLIENTS, fraction_evaluate=0.0, min_available_nodes=rivals.CLIENTS
    )
    first = ArrayRecord(rivals.net(name).state_dict())
    strategy.start(grid, first, num_rounds=rivals.ROUNDS, evaluate_fn=stamp)
    return stamps


def train(host: str, name: str) -> list[float]:
    """Rounds on one of the two hosts."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = client_app(name)
    if host == "grid":
        from sparing.federated.flower import InProcessGrid

        return rivals.gaps(rounds(InProcessGrid(app, rivals.CLIENTS), name))
    from flwr.simulation import run_simulation

    found: list[list[float]] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.append(rounds(grid, name))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=rivals.CLIENTS, backend_config=resources)
    return rivals.gaps(found[0])


if __name__ == "__main__":
    rivals.serve(functools.partial(train, sys.argv[1]))
