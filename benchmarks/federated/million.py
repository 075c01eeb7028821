"""A million clients under SCAFFOLD: resident memory, size of checkpoints and seconds over a thousand rounds.

A hundred clients a round, made when drawn, 20 rows of 40 numbers each, a perceptron of one hidden layer; every client's
control variate lies on disk, and every tenth round is a checkpoint. Memory, the bytes of the states' file and of the
checkpoint are read after every fiftieth round. The states of 95,000 clients take about half a gigabyte of the temporary
folder. A row has the whole run; an interrupted one begins anew, for memory is that of one process.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.federated.store import Store
from sparing.federated import SCAFFOLD, Client, Schedule, simulate
from sparing.federated.client.population import Population
from sparing.seeds import stream

CLIENTS, COHORT, ROUNDS, EVERY, SAVED = 1_000_000, 100, 1000, 50, 10
ROWS, INPUTS, HIDDEN, CLASSES = 20, 40, 16, 10


def run(share: int, of: int) -> None:
    """One row; there is nothing to divide."""
    if not share:
        Store("million").once(f"SCAFFOLD, {CLIENTS:,} clients", measured)


def measured(clients: int = CLIENTS, cohort: int = COHORT, rounds: int = ROUNDS, every: int = EVERY) -> dict[str, Any]:
    """Train, and read what the process and its files hold."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "run.safetensors"
        schedule = Schedule(
            rounds=rounds, participation=cohort / clients, local_epochs=1, batch_size=10, lr=0.05, momentum=0.0,
        )  # fmt: skip
        done = simulate(
            network, Population(rows_of, torch.full((clients,), ROWS)), SCAFFOLD(), schedule, every=every,
            evaluate=sizes_beside(file), members=False, checkpoint=file, checkpoint_every=min(SAVED, every),
        )  # fmt: skip
        read = [row for row in done.record if "resident" in row]
        first, *rest = [row["resident"] for row in read]
        visited = len(done.state.clients)
    seconds = sorted(row["seconds"] for row in done.record)
    return {
        "resident": [row["resident"] for row in read], "states": [row["states"] for row in read],
        "checkpoint": [row["checkpoint"] for row in read], "rounds": [row["round"] for row in read],
        "growth": max(rest, default=first) / first - 1, "visited": visited, "seconds": seconds[len(seconds) // 2],
        "engine": done.engine,
    }  # fmt: skip


def network() -> nn.Module:
    """A perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def rows_of(client: int) -> Client:
    """Rows of a client: normal, around a centre of its own, with classes by a common rule."""
    source = stream(0, "million", client)
    inputs = torch.randn(ROWS, INPUTS, generator=source) + 0.5 * torch.randn(INPUTS, generator=source)
    return Client(inputs, (inputs @ _rule()).argmax(1))


@functools.cache
def _rule() -> torch.Tensor:
    return torch.randn(INPUTS, CLASSES, generator=stream(0, "million", "rule"))


def sizes_beside(file: Path) -> Callable[[nn.Module], dict[str, float]]:
    """What reads resident memory and the files of a run (bytes)."""

    def read(model: nn.Module) -> dict[str, float]:
        status = Path("/proc/self/status").read_text()
        resident = 1024 * int(status.partition("VmRSS:")[2].split()[0])
        states = sum(one.stat().st_size for one in file.parent.glob(f"{file.name}.states-*"))
        return {"resident": resident, "states": states, "checkpoint": file.stat().st_size if file.exists() else 0}

    return read
