"""Ring all-gather, reduce-scatter and all-reduce over one axis, on point-to-point messages, with every byte counted.

With w ranks on the axis, me = r, and chunks c[0 … w-1] of which c[r] belongs to rank r, each step sends to r + 1 and
receives from r - 1 (all indices modulo w):

    all-gather      step h: send c[r-h],   receive c[r-h-1]
    reduce-scatter  step h: send c[r-h-1], receive into a buffer that is added to c[r-h-2]; c[r] is complete at the end
    all-reduce      the second, then the first: all ranks end with the same bits

The all-reduce is one sequence of steps t = 0 … 2w-3 in which chunk me-1-t leaves and chunk me-2-t comes: the first w-1
reduce, the others gather. Every chunk travels in parts, and a part goes on as soon as it has come, so that the wire is
busy while threads wake up. Chunks may differ in length, and a chunk of no elements sends no message.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sparing.errors import RunError, require
from sparing.sharding.network.rendezvous import name_ranks

# A chunk travels in parts of about this many bytes, so that handling one overlaps receiving the next.
PART_BYTES = 1 << 18

# Receives are posted this many steps ahead: a message whose receive is missing has to ask for it.
AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the mesh as this rank sees it."""

    name: str  # ``intra``, ``middle``, ``inter``, or ``global`` where there is one
    size: int
    index: int  # my place on it
    ranks: tuple[int, ...]  # global ranks along it, in order of place
    group: ProcessGroup | None  # None where I am alone

    def neighbour(self, step: int) -> int:
        """Place ``step`` further on the ring, which is also the rank in ``group``: ranks rise along an axis."""
        return (self.index + step) % self.size


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """One direction of a link: a slower network without privileges, by holding messages back as it would."""

    rate: float  # payload that the link carries (B/s)
    latency: float = 0.0  # added to each message, the α of the cost model (s)
    sharing: int = 1  # ranks that send over the link at once, κ: each gets an equal part of the rate

    def __post_init__(self) -> None:
        require(self.rate > 0, "rate", self.rate, "nothing would arrive", "pass bytes per second above 0")
        require(self.latency >= 0, "latency", self.latency, "it is a time", "pass seconds >= 0")
        require(self.sharing >= 1, "sharing", self.sharing, "the sender is one of them", "pass a count >= 1")

    def seconds(self, nbytes: int) -> float:
        """Time of one message (s)."""
        return self.latency + nbytes * self.sharing / self.rate


class Throttle:
    """Holds each message of one rank until its last byte would have arrived."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._free = 0.0

    def hold(self, nbytes: int) -> None:
        """Sleep until a message that starts now, or when the link is free, would have arrived (B)."""
        self._free = max(time.perf_counter(), self._free) + self._limit.seconds(nbytes)
        while (left := self._free - time.perf_counter()) > 0:
            time.sleep(left)


class Counter:
    """Payload bytes and messages that this rank sent, by axis."""

    def __init__(self, axes: Iterable[str] = ()) -> None:
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


class Ring:
    """Blocking collectives on one axis; used by one thread at a time, which is what a lane is for."""

    def __init__(self, axis: Axis, counter: Counter, throttle: Throttle | None = None) -> None:
        self.axis, self.width, self.me = axis, axis.size, axis.index
        self._counter, self._throttle = counter, throttle
        self._group = axis.group
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def all_gather_(self, chunks: Sequence[Tensor]) -> None:
        """Fill every chunk (one per rank, contiguous, the same lengths on all) from the rank it belongs to."""
        self._run(chunks, range(self.width - 1, 2 * self.width - 2), "all-gather")

    def reduce_scatter_(self, chunks: Sequence[Tensor]) -> Tensor:
        """Sum my chunk over the ranks of the axis and return it; the others are left with partial sums."""
        self._run(chunks, range(self.width - 1), "reduce-scatter")
        return chunks[self.me]

    def all_reduce_(self, chunks: Sequence[Tensor]) -> None:
        """Sum every chunk over the ranks of the axis, with the same bits on all."""
        self._run(chunks, range(2 * self.width - 2), "all-reduce")

    def _run(self, chunks: Sequence[Tensor], steps: range, doing: str) -> None:
        """Take some steps of the sequence; each part of what came leaves as the next step's."""
        if not steps:
            return
        with self.explain_errors(doing):
            ring_pass = _Pass(self, chunks, steps)
            for t in range(steps[0], steps[0] + ring_pass.ahead):
                ring_pass.post_receives(t)
            ring_pass.send_parts(steps[0], ring_pass.coming(steps[0] - 1))
            for t in steps:
                ring_pass.send_parts(t + 1, ring_pass.arrivals(t))
                ring_pass.post_receives(t + ring_pass.ahead)
            ring_pass.end()

    def gather_step(self, chunks: Sequence[Tensor], h: int) -> None:
        """Step h of an all-gather: chunk me - h leaves, chunk me - h - 1 comes."""
        with self.explain_errors("all-gather"):
            mine = chunks[(self.me - h) % self.width]
            receive_works, leaving = self.receive(chunks[(self.me - h - 1) % self.width], h), self.send(mine, h)
            self.count(mine)
            wait_all(receive_works)
            wait_all(leaving)

    def scatter_step(self, chunks: Sequence[Tensor], h: int, ready: Callable[[], object] | None = None) -> None:
        """Step h of a reduce-scatter: chunk me - h - 1 leaves, and what comes is added to chunk me - h - 2.

        ``ready`` is called before the addition, where its target is computed meanwhile.
        """
        away, mine = chunks[(self.me - h - 1) % self.width], chunks[(self.me - h - 2) % self.width]
        with self.explain_errors("reduce-scatter"):
            received = _cut(self.scratch(mine.nbytes).view(mine.dtype))
            arriving = [self.receive(scratch, h) for scratch in received]
            leaving = [work for part in _cut(away) for work in self.send(part, h)]
            self.count(away)
            if ready is not None:
                ready()
            for part, scratch, receive_works in zip(_cut(mine), received, arriving, strict=True):
                wait_all(receive_works)
                part += scratch
            wait_all(leaving)

    def scratch(self, nbytes: int) -> Tensor:
        """The beginning of the buffer that lasts."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]

    def receive(self, into: Tensor, tag: int, step: int = -1) -> list[dist.Work]:
        """Post a receive from the rank ``step`` places further; nothing for an empty chunk."""
        if self._group is None or not into.numel():
            return []
        return [self._group.recv([into], self.axis.neighbour(step), tag)]

    def send(self, part: Tensor, tag: int, step: int = 1) -> list[dist.Work]:
        """Hold a message back as the throttle says, and post it; nothing for an empty one."""
        if self._group is None or not part.numel():
            return []
        if self._throttle is not None:
            self._throttle.hold(part.nbytes)
        return [self._group.send([part], self.axis.neighbour(step), tag)]

    def count(self, chunk: Tensor) -> None:
        """Count a chunk that leaves, as one message however many parts it has."""
        if self._group is not None and chunk.numel():
            self._counter.add(self.axis.name, chunk.nbytes)

    @contextlib.contextmanager
    def explain_errors(self, doing: str, steps: Sequence[int] = (-1, 1)) -> Iterator[None]:
        """Name the axis and those who were waited for, so many places further, in an error of the network."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            ranks, name = self.axis.ranks, self.axis.name
            peers = sorted({ranks[self.axis.neighbour(step)] for step in steps})
            who = f"rank {ranks[self.me]} waited for {name_ranks(peers)}"
            raise RunError(f"{doing} over axis {name!r}: {who}: {_reason(error)}") from error


class _Pass:
    """Some steps of the sequence on their way round one ring."""

    def __init__(self, ring: Ring, chunks: Sequence[Tensor], steps: range) -> None:
        self.ring, self.steps, self.ahead = ring, steps, min(AHEAD, ring.width - 1)
        self._chunks, self._parts = chunks, [_cut(chunk) for chunk in chunks]
        longest = max(chunk.nbytes for chunk in chunks) if self._adds(steps[0]) else 0
        scratch = (
            torch.split(ring.scratch(longest * self.ahead), longest) if longest else [ring.scratch(0)] * self.ahead
        )
        self._scratch = [landing.view(chunks[0].dtype) for landing in scratch]
        self._arriving: dict[int, list[list[dist.Work]]] = {}
        self._leaving: dict[int, deque[list[dist.Work]]] = {}

    def coming(self, t: int) -> Sequence[Tensor]:
        """Parts of the chunk that comes in step t, and leaves in the next."""
        return self._parts[self._place(t)]

    def _place(self, t: int) -> int:
        return (self.ring.me - 2 - t) % self.ring.width

    def _adds(self, t: int) -> bool:
        return t < self.ring.width - 1

    def _landing(self, t: int) -> Sequence[Tensor]:
        """Where step t's message is received: beside its chunk if it will be added, else in its place."""
        if not self._adds(t):
            return self.coming(t)
        landing = self._scratch[t % self.ahead]
        return torch.split(landing[: self._chunks[self._place(t)].numel()], [part.numel() for part in self.coming(t)])

    def post_receives(self, t: int, most: int | None = None) -> None:
        """Post the receives of a step, or only of its first parts; what has left from the same memory must be gone."""
        if t not in self.steps:
            return
        receives = self._arriving.setdefault(t, [])
        for part in self._landing(t)[len(receives) : most]:
            if left := self._leaving.get(t + 1 - self.ring.width):
                # popped, because gloo waits forever on work that was waited for once
                wait_all(left.popleft())
            receives.append(self.ring.receive(part, t))

    def arrivals(self, t: int) -> Iterator[Tensor]:
        """Parts of a step as they come, complete for the next one."""
        receives = self._arriving.pop(t)
        for at, (part, landing) in enumerate(zip(self.coming(t), self._landing(t), strict=True)):
            wait_all(receives[at])
            if self._adds(t):
                part += landing
            # if it does add, its scratch space may still hold what came and is not yet added
            if not self._adds(t + 1):
                self.post_receives(t + 1, at + 1)
            yield part

    def send_parts(self, t: int, parts: Iterable[Tensor]) -> None:
        """Send what comes out of ``parts`` as step t, if that is one of mine; else only wait for it."""
        leaving = self._leaving.setdefault(t, deque())
        if t in self.steps:
            self.ring.count(self._chunks[self._place(t - 1)])
        for part in parts:
            if t in self.steps:
                leaving.append(self.ring.send(part, t))

    def end(self) -> None:
        """Wait until everything has left."""
        for parts in self._leaving.values():
            for works in parts:
                wait_all(works)


def _reason(error: RuntimeError) -> str:
    """What gloo says, without where in its sources it says it and what it advises."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". This is typically")[0]


def _cut(chunk: Tensor) -> tuple[Tensor, ...]:
    """Parts of a chunk, the same on every rank that has a chunk of this length."""
    count = max(1, round(chunk.nbytes / PART_BYTES))
    return torch.tensor_split(chunk, count)


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for messages, once for each."""
    for work in works:
        work.wait()
