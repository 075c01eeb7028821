"""Ring all-gather, reduce-scatter and all-reduce over one axis, on point-to-point messages, with every byte counted.

With w ranks on the axis, me = r, and chunks c[0 … w-1] of which c[r] belongs to rank r, each step sends to r + 1 and
receives from r - 1 (all indices modulo w):

    all-gather      step h: send c[r-h],   receive c[r-h-1]
    reduce-scatter  step h: send c[r-h-1], receive into a buffer that is added to c[r-h-2]; c[r] is complete at the end
    all-reduce      the second, then the first: all ranks end with the same bits

Chunks may differ in length, and a chunk of no elements sends no message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.errors import RunError
from sparing.sharding.meet import name_ranks

if TYPE_CHECKING:
    from sparing.sharding.mesh import Axis

SPAN = 1 << 20
"""A message of a reduction holds at most this many bytes, so that adding one part overlaps receiving the next (B)."""


class Counter:
    """Payload bytes and messages that this rank sent, by axis."""

    def __init__(self, axes: Iterable[str] = ()) -> None:
        """Start at zero for each axis, named so that an idle one is shown too."""
        self.sent: dict[str, int] = dict.fromkeys(axes, 0)
        self.messages: dict[str, int] = dict.fromkeys(self.sent, 0)

    def add(self, axis: str, nbytes: int) -> None:
        """Count one message of a ring; an axis has one lane, so no two threads count on the same one."""
        self.sent[axis] = self.sent.get(axis, 0) + nbytes
        self.messages[axis] = self.messages.get(axis, 0) + 1

    def reset(self) -> None:
        """Back to zero; while no collective is running."""
        for axis in self.sent:
            self.sent[axis] = self.messages[axis] = 0


class Gate(Protocol):
    """What holds a message back as a slower network would."""

    def hold(self, nbytes: int) -> None:
        """Return when the last byte of the message would have arrived (B)."""
        ...


class Ring:
    """Blocking collectives on one axis; used by one thread at a time, which is what a lane is for."""

    def __init__(self, axis: Axis, counter: Counter, gate: Gate | None = None) -> None:
        """Place this rank between its two neighbours.

        Args:
            axis: Its ranks in ring order and their process group.
            counter: Where sent bytes are counted.
            gate: Throttle of what is sent; none for the network as it is.
        """
        self.axis, self.width, self.me = axis, axis.size, axis.index
        self._counter, self._gate = counter, gate
        self._group = axis.group
        self._right = axis.neighbour(1)
        self._left = axis.neighbour(-1)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def all_gather_(self, chunks: Sequence[Tensor]) -> None:
        """Fill every chunk from the rank it belongs to.

        Args:
            chunks: One per rank of the axis, contiguous, the same lengths on all; mine holds my data.
        """
        with self._told("all-gather"):
            # chunks are only read until the end, so all receipts are posted at once and no step waits for a sending
            arriving = [self._receive(chunks[(self.me - h - 1) % self.width], h) for h in range(self.width - 1)]
            leaving: list[dist.Work] = []
            for h, receipt in enumerate(arriving):
                leaving += self._send(chunks[(self.me - h) % self.width], h)
                _settle(receipt)
            _settle(leaving)

    def reduce_scatter_(self, chunks: Sequence[Tensor]) -> Tensor:
        """Sum my chunk over the ranks of the axis.

        Args:
            chunks: One per rank of the axis, contiguous, the same lengths on all; overwritten with partial sums.

        Returns:
            My chunk, complete.
        """
        for h in range(self.width - 1):
            self.scatter_step(chunks, h)
        return chunks[self.me]

    def all_reduce_(self, chunks: Sequence[Tensor]) -> None:
        """Sum every chunk over the ranks of the axis, with the same bits on all.

        Args:
            chunks: One per rank of the axis, contiguous, the same lengths on all.
        """
        self.reduce_scatter_(chunks)
        self.all_gather_(chunks)

    def gather_step(self, chunks: Sequence[Tensor], h: int) -> None:
        """Step h of an all-gather: chunk me - h leaves, chunk me - h - 1 comes."""
        with self._told("all-gather"):
            receipt = self._receive(chunks[(self.me - h - 1) % self.width], h)
            leaving = self._send(chunks[(self.me - h) % self.width], h)
            _settle(receipt)
            _settle(leaving)

    def scatter_step(self, chunks: Sequence[Tensor], h: int, ready: Callable[[], object] | None = None) -> None:
        """Step h of a reduce-scatter: chunk me - h - 1 leaves, and what comes is added to chunk me - h - 2.

        Args:
            chunks: As in ``reduce_scatter_``.
            h: From 0 to w - 2.
            ready: Called before the addition, where its target is made meanwhile.
        """
        away, mine = chunks[(self.me - h - 1) % self.width], chunks[(self.me - h - 2) % self.width]
        span = SPAN // mine.element_size()
        with self._told("reduce-scatter"):
            spares = torch.split(self._spare(mine), span)
            arriving = [self._receive(spare, h) for spare in spares]
            leaving = self._send(away, h, span)
            if ready is not None:
                ready()
            for part, spare, receipt in zip(torch.split(mine, span), spares, arriving, strict=True):
                _settle(receipt)
                part += spare
            _settle(leaving)

    def _spare(self, like: Tensor) -> Tensor:
        """The buffer that lasts, seen as a tensor of this type and length."""
        need = like.numel() * like.element_size()
        if self._buffer.numel() < need:
            self._buffer = torch.empty(need, dtype=torch.uint8)
        return self._buffer[:need].view(like.dtype)

    def _receive(self, into: Tensor, tag: int) -> list[dist.Work]:
        """Post a receipt; nothing for nothing."""
        if self._group is None or not into.numel():
            return []
        return [self._group.recv([into], self._left, tag)]

    def _send(self, chunk: Tensor, tag: int, span: int | None = None) -> list[dist.Work]:
        """Count a chunk, hold it as the throttle says, and post it: whole, or in parts of ``span`` elements."""
        if self._group is None or not chunk.numel():
            return []
        nbytes = chunk.numel() * chunk.element_size()
        self._counter.add(self.axis.name, nbytes)
        if self._gate is not None:
            self._gate.hold(nbytes)
        parts = (chunk,) if span is None else torch.split(chunk, span)
        return [self._group.send([part], self._right, tag) for part in parts]

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Name the axis and the neighbours in an error of the network."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            ranks, name = self.axis.ranks, self.axis.name
            who = f"rank {ranks[self.me]} waited for {name_ranks(sorted({ranks[self._left], ranks[self._right]}))}"
            raise RunError(f"{doing} over axis {name!r}: {who}: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """What gloo says, without where in its sources it says it and what it advises."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". This is typically")[0]


def _settle(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
