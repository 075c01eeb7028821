"""How far honest clients lie from what they received, in medians of their round: what the guard must let pass."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.federated.cases import CASES, SIGNALS, Case
from benchmarks.federated.store import Store
from sparing.federated import simulate
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.interface import Method, State, Update, Vector
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.faults import Guard
from sparing.vectors import norm

ROUNDS, SEEDS = 25, (0, 1)
METHODS: dict[str, tuple[Method, float]] = {
    "fedavg": (FedAvg(), 0.1), "scaffold": (SCAFFOLD(momentum=0.9), 0.05), "feddyn": (FedDyn(alpha=0.1), 0.05),
}  # fmt: skip
"""Method and rate."""


class Measured:
    """A method that remembers the largest distance of a client, in medians of its round, by what travels."""

    def __init__(self, method: Method) -> None:
        """Measure a method."""
        self._method = method
        self.largest: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        """As the method."""
        return getattr(self._method, name)

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """As the method."""
        self._note("parameters", [_apart(update.params, global_params) for update in updates])
        for key in updates[0].extras:
            self._note(key, [float(norm(update.extras[key])) for update in updates])
        return self._method.aggregate(global_params, updates, server_state, clients)

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """As the method."""
        for name, value in global_buffers.items():
            lengths = [_apart({name: update.buffers[name]}, {name: value}) for update in updates]
            self._note(name.rsplit(".", 1)[-1], lengths)
        return self._method.buffers(global_buffers, updates)

    def _note(self, what: str, lengths: Sequence[float]) -> None:
        middle = statistics.median(lengths)
        if middle:
            self.largest[what] = max(self.largest.get(what, 0.0), max(lengths) / middle)


def _apart(vector: Vector, base: Vector) -> float:
    return float(norm({name: value.double() - base[name].double() for name, value in vector.items()}))


def _row(case: Case, alpha: float, name: str, seed: int) -> Mapping[str, Any]:
    method, rate = METHODS[name]
    measured, short = Measured(method), replace(case, rounds=ROUNDS)
    run = simulate(
        short.make_model(), short.clients(alpha, seed), measured, short.schedule(rate), seed=seed, members=False,
        engine="loop", guard=Guard(huge=None),
    )  # fmt: skip
    about = {"case": case.name, "alpha": alpha, "method": name, "seed": seed, "updates": len(run.record) * 10}
    return about | {"largest": measured.largest}


def run(share: int, of: int) -> None:
    """A row for each case, alpha, method and seed."""
    store = Store("distances")
    wanted = [(c, a, m, s) for c in (SIGNALS, CASES[2]) for a in (0.5, 0.1) for m in METHODS for s in SEEDS]
    for case, alpha, name, seed in wanted[share::of]:
        key = f"{case.name}, {alpha:g}, {name}, {seed}"
        store.once(key, lambda: _row(case, alpha, name, seed))  # noqa: B023
