"""Which Flower node is which client, and what a node's error says."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from sparing.errors import require
from sparing.federated.flower.client import IDENTITY
from sparing.federated.flower.records import config_of
from sparing.federated.server.faults import Fault

_POLL = 0.2  # seconds between two checks of which nodes are online


class NodeRegistry:
    """Which node is which client: as keys were registered, or as each node said once when it was asked."""

    def __init__(self, clients: int, patience: float, nodes: Mapping[int, int] | None = None) -> None:
        """Take how many clients there are, how long to wait for them (seconds), and which node is which if known."""
        self.clients, self.patience = clients, patience
        self.client_of: dict[int, int] = dict(nodes or {})  # of each node that was believed
        unknown = [client for client in self.client_of.values() if not 0 <= client < clients]
        require(not unknown, "nodes", f"client {unknown[:1]}", f"there are {clients}, from 0", "pass node -> client")
        self._bound = nodes is not None
        self._why: dict[int, str] = {}

    @property
    def refused(self) -> tuple[str, ...]:
        """Nodes and reasons."""
        return tuple(f"node {node}: {why}" for node, why in sorted(self._why.items()))

    def find(self, grid: Grid, wanted: Sequence[int], absent: Collection[int] = ()) -> dict[int, int]:
        """Return the node of each wanted client that is online, in the order wanted; wait for those that are not.

        For a client that was ``absent`` before nobody waits, unless all are.
        """
        hopeful = [client for client in wanted if client not in absent] or wanted
        end = time.monotonic() + self.patience
        # A node that was refused may identify itself correctly in the next round.
        self._why = {}
        while True:
            online = set(grid.get_node_ids())
            self._ask(grid, sorted(online - self.client_of.keys() - self._why.keys()), online)
            nodes = {client: node for node, client in self.client_of.items() if node in online}
            if all(client in nodes for client in hopeful) or time.monotonic() > end:
                return {client: nodes[client] for client in wanted if client in nodes}
            time.sleep(_POLL)

    def _ask(self, grid: Grid, nodes: Sequence[int], online: Collection[int]) -> None:
        if self._bound:
            self._why |= dict.fromkeys(nodes, "its key is registered for no client")
            return
        if not nodes:
            return
        asks = [Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node) for node in nodes]
        replies = grid.send_and_receive(asks, timeout=max(self.patience, 1.0))
        # By node, so that of two nodes that claim one client the same one wins in every run.
        for reply in sorted(replies, key=lambda one: int(one.metadata.src_node_id)):
            node = reply.metadata.src_node_id
            why = self._refusal(reply, online)
            if why:
                self._why[node] = why
            elif node in nodes:
                self.client_of[node] = config_of(reply.content, IDENTITY)["client"]

    def _refusal(self, reply: Message, online: Collection[int]) -> str:
        """Why a node is not the client that it says it is, empty if it is."""
        if reply.has_error():
            return f"cannot say which client it is; {last_line(reply.error.reason)}"
        number = config_of(reply.content, IDENTITY).get("client")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.clients:
            return f"says it is client {number} of {self.clients}; check its partition-id"
        holder = next((node for node, client in self.client_of.items() if client == number and node in online), None)
        return "" if holder is None else f"says it is client {number}, which node {holder} is; check its partition-id"


def absent_faults(wanted: Sequence[int], nodes: Mapping[int, int]) -> list[Fault]:
    """Name the wanted clients that have no node."""
    return [Fault(client, "absent", "not online") for client in wanted if client not in nodes]


def last_line(text: str | None) -> str:
    """Return the last line of an error's reason, which is the readable one."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
