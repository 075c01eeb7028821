"""How the clients of a round are trained: one after another, stacked, or in several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sparing.errors import UserError
from sparing.federated.faults import Fault
from sparing.federated.loop import Client, Visit, Workbench, train
from sparing.federated.methods import Sent, State, Vector

Answers = tuple[list[Visit], list[Fault]]
"""Visits of the clients that answered, and faults of those that did not."""


class Engine(Protocol):
    """Trains the clients of one round."""

    name: str

    def visits(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], own: Mapping[int, Vector]
    ) -> Answers:
        """Train the clients ``ids``; results and faults are in their order."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class Loop:
    """One client after another in this process: the reference."""

    name = "loop"

    def __init__(self, bench: Workbench, clients: Sequence[Client]) -> None:
        """Take a bench and all clients."""
        self._bench, self._clients = bench, clients

    def visits(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], own: Mapping[int, Vector]
    ) -> Answers:
        """Train clients; see ``Engine.visits``."""
        found: list[Visit] = []
        faults: list[Fault] = []
        for client in ids:
            try:
                rows, state, mine = self._clients[client], states[client], own.get(client)
                found.append(train(self._bench, rows, sent, state, number=number, client_id=client, own=mine))
            except Exception as error:  # noqa: BLE001  # whatever a client raises, the round survives it
                faults.append(crash(client, error))
        return found, faults

    def close(self) -> None:
        """Hold nothing."""


def crash(client: int, error: BaseException) -> Fault:
    """Name what a client raised, in one line."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Fault(client, "crash", " ".join(text.split())[:200])
