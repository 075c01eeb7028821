"""Which Flower node is which client, and what a node's error says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from sparing.errors import RunError
from sparing.federated.faults import Fault
from sparing.federated.flower_client import WHO
from sparing.federated.flower_records import config_of

_POLL = 0.2  # seconds between two looks at who is there


class People:
    """Which node is which client: asked once of every node, the newest node of a client holds."""

    def __init__(self, clients: int, patience: float) -> None:
        """Take how many clients there are, and how long to wait for them (seconds)."""
        self.clients, self.patience = clients, patience
        self.client_of: dict[int, int] = {}

    def find(self, grid: Grid, wanted: Sequence[int]) -> dict[int, int]:
        """Return the node of each wanted client that is online, in the order wanted; wait for those that are not."""
        end = time.monotonic() + self.patience
        while True:
            online = list(grid.get_node_ids())
            self._ask(grid, [node for node in online if node not in self.client_of])
            nodes = {self.client_of[node]: node for node in self.client_of if node in set(online)}
            if all(client in nodes for client in wanted) or time.monotonic() > end:
                return {client: nodes[client] for client in wanted if client in nodes}
            time.sleep(_POLL)

    def _ask(self, grid: Grid, nodes: Sequence[int]) -> None:
        if not nodes:
            return
        asks = [Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node) for node in nodes]
        for reply in grid.send_and_receive(asks, timeout=max(self.patience, 1.0)):
            node = reply.metadata.src_node_id
            if reply.has_error():
                raise RunError(f"node {node}: cannot say which client it is; {last_line(reply.error.reason)}")
            number = config_of(reply.content, WHO).get("client")
            if not isinstance(number, int) or not 0 <= number < self.clients:
                raise RunError(f"node {node}: says it is client {number} of {self.clients}; check its partition-id")
            # Last in the order of the dictionary is newest.
            self.client_of.pop(node, None)
            self.client_of[node] = number


def absent(wanted: Sequence[int], nodes: Mapping[int, int]) -> list[Fault]:
    """Name the wanted clients that have no node."""
    return [Fault(client, "absent", "not online") for client in wanted if client not in nodes]


def last_line(text: str | None) -> str:
    """Return the last line of an error's reason, which is the one for people."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
