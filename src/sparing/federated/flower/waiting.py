"""Replies of a Flower grid as they come, until a round closes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from sparing.federated.server.closing import OpenRound

_POLL = 0.2  # seconds between two looks at who replied


class ClosingGrid:
    """A grid whose messages to train or evaluate are waited for as ``OpenRound`` says; all else is the grid's own."""

    def __init__(self, grid: Grid) -> None:
        """Begin without an open round: then all replies are waited for."""
        self._grid = grid
        self.waiting: OpenRound | None = None
        self.clients: Mapping[int, int] = {}  # node -> client
        self.rank: Mapping[int, int] = {}  # client -> whose reply counts first of those that come together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come until the round closes."""
        sent = list(messages)
        waits = bool(sent) and sent[0].metadata.message_type in {MessageType.TRAIN, MessageType.EVALUATE}
        if self.waiting is None or not waits:
            replies: Iterable[Message] = self._grid.send_and_receive(sent, timeout=timeout)
            return replies
        return collect(self._grid, sent, timeout, self.waiting, self.clients, self.rank)


def collect(
    grid: Grid, messages: Iterable[Message], timeout: float | None, waiting: OpenRound, clients: Mapping[int, int],
    rank: Mapping[int, int],
) -> list[Message]:  # fmt: skip
    """Send messages and return the replies that come before nothing is waited for, or time is over (seconds)."""
    end = None if timeout is None else time.monotonic() + timeout
    left, replies = set(grid.push_messages(messages)), []
    while left:
        came = list(grid.pull_messages(left))
        left -= {reply.metadata.reply_to_message_id for reply in came}
        known = [reply for reply in came if reply.metadata.src_node_id in clients]
        for reply in sorted(known, key=lambda one: rank.get(clients[one.metadata.src_node_id], 0)):
            if not waiting.enough:
                waiting.take(clients[reply.metadata.src_node_id], update=not reply.has_error())
                replies.append(reply)
        if waiting.closed or (end is not None and time.monotonic() > end):
            break
        time.sleep(_POLL)
    return replies
