"""How the clients of a round are trained: one after another, stacked, or in several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sparing.errors import UserError
from sparing.federated.client.train import Client, ClientResult, ClientSetup, train
from sparing.federated.methods.interface import Sent, State, Vector
from sparing.federated.server.faults import Fault

RoundResults = tuple[list[ClientResult], list[Fault]]
"""Visits of the clients that answered, and faults of those that did not."""


class Engine(Protocol):
    """Trains the clients of one round."""

    name: str

    def train_clients(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], local_bn: Mapping[int, Vector]
    ) -> RoundResults:
        """Train the clients ``ids``; results and faults are in their order."""

    def close(self) -> None:
        """Give back what the engine holds."""


class Loop:
    """One client after another in this process: the reference."""

    name = "loop"

    def __init__(self, setup: ClientSetup, clients: Sequence[Client]) -> None:
        self._setup, self._clients = setup, clients

    def train_clients(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], local_bn: Mapping[int, Vector]
    ) -> RoundResults:
        """Train clients; see ``Engine.train_clients``."""
        results: list[ClientResult] = []
        faults: list[Fault] = []
        for client in ids:
            try:
                rows, state, mine = self._clients[client], states[client], local_bn.get(client)
                results.append(train(self._setup, rows, sent, state, number=number, client_id=client, local_bn=mine))
            except Exception as error:  # noqa: BLE001  # whatever a client raises, the round survives it
                faults.append(crash_fault(client, error))
        return results, faults

    def close(self) -> None:
        """Hold nothing."""


def crash_fault(client: int, error: BaseException) -> Fault:
    """Name what a client raised, in one line."""
    # A refusal of ours says what and why by itself; of other errors the class says more than the text.
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Fault(client, "crash", " ".join(text.split())[:200])
