"""Collectives of the axis between groups in few bits: one rounding for each sum, never one for each hop.

With w ranks on the axis, me = r, and parts x[0 … w-1] of a slice of which x[r] belongs to rank r:

    reduce-scatter   to each k ≠ r: send code(x[k] + e[k]), keep e[k] := x[k] + e[k] - decoded; my sum is
                     x[r] + e[r] + all that was decoded, in the precision of x
    all-reduce       the same, then code(sum + e[r]) goes round by an all-gather; all ranks, I too, take what it
                     decodes to
    all-gather       of changes: code(master - parameter) goes round, and all ranks add what it decodes to

A ring that rounds the sum anew at each hop would round w-1 times, each time what others have rounded before, and no
rank could say what of its own gradient was lost. Messages and their number are those of the rings; only bytes are
fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.sharding.lowbit.blocks import Blocks
from sparing.sharding.lowbit.residuals import Ranges, Residual, bring_back_, set_aside_
from sparing.sharding.network.rings import Ring, wait_all


@dataclass(frozen=True, slots=True)
class GradientWires:
    """Sums of gradients over the axis between groups, for one bucket."""

    ring: Ring
    blocks: Blocks
    residual: Residual | None  # none: without error feedback
    # Of parameters that had no gradient on this rank, in the slice that the axis cuts, and in my part of it.
    unused: Ranges = ()
    unused_mine: Ranges = ()

    def reduce_scatter_(self, whole: Tensor) -> Tensor:
        """Sum my part over the axis, leaving the others as they are."""
        mine = self._sum_mine_(whole)
        if self.residual is not None:
            # nothing more is sent, so what a change of ranks has left here is given back whole
            owed = self.residual.value.view(self.ring.width, -1)[self.ring.me]
            held = set_aside_(owed, mine, self.unused_mine)
            mine.add_(owed)
            owed.zero_()
            bring_back_(held)
        return mine

    def all_reduce_(self, whole: Tensor) -> None:
        """Sum all parts over the axis, with the same bits on all ranks."""
        ring, mine = self.ring, self._sum_mine_(whole)
        coded = torch.empty(ring.width, self.blocks.nbytes(mine.numel()), dtype=torch.uint8)
        if self.residual is None:
            self._encode_(mine, coded[ring.me])
        else:
            owed = self.residual.value.view(ring.width, -1)[ring.me]
            held = set_aside_(owed, mine, self.unused_mine)
            self._encode_(owed.add_(mine), coded[ring.me])
            bring_back_(held)
        ring.all_gather_(coded.unbind(0))
        for part, payload in zip(whole.view(ring.width, -1).unbind(0), coded.unbind(0), strict=True):
            for into, piece in self.blocks.pieces(part, payload=payload):
                into.copy_(self.blocks.decoded(piece, into.numel()))

    def all_gather_(self, whole: Tensor) -> None:
        """There is none: whole sums come back over the axes inside a group only."""
        raise AssertionError(whole.shape)

    def _sum_mine_(self, whole: Tensor) -> Tensor:
        """Send every part to its owner, and add what comes to mine."""
        ring, parts = self.ring, whole.view(self.ring.width, -1)
        nbytes, mine, others = self.blocks.nbytes(parts.shape[1]), parts[ring.me], range(1, ring.width)
        owed, held = parts, []
        if self.residual is not None:
            self.residual.begin_()
            owed = self.residual.value.view_as(parts)
            held = set_aside_(self.residual.value, whole, self.unused)
        with ring.explain_errors("low-bit sum", others):
            arriving, going = torch.empty(2, len(others), nbytes, dtype=torch.uint8)
            receipts = [
                [ring.receive(piece, h, -h) for _, piece in self.blocks.pieces(mine, payload=payload)]
                for h, payload in zip(others, arriving, strict=True)
            ]
            leaving = [
                work for h, payload in zip(others, going, strict=True) for work in self._send_(parts, owed, h, payload)
            ]
            for payload, works in zip(arriving, receipts, strict=True):
                for (into, piece), work in zip(self.blocks.pieces(mine, payload=payload), works, strict=True):
                    wait_all(work)
                    into.add_(self.blocks.decoded(piece, into.numel()))
            wait_all(leaving)
        bring_back_(held)
        return mine

    def _send_(self, parts: Tensor, owed: Tensor, h: int, payload: Tensor) -> Iterator[dist.Work]:
        """Send the part of the rank h places further, a piece as soon as it is encoded; what is left stays owed."""
        ring, to = self.ring, self.ring.axis.neighbour(h)
        ring.count(payload)
        for given, rest, piece in self.blocks.pieces(parts[to], owed[to], payload=payload):
            if self.residual is not None:
                rest.add_(given)
            self.blocks.encode_(rest, piece)
            yield from ring.send(piece, h, h)

    def _encode_(self, x: Tensor, payload: Tensor) -> None:
        for part, piece in self.blocks.pieces(x, payload=payload):
            self.blocks.encode_(part, piece)


@dataclass(frozen=True, slots=True)
class ChangeWires:
    """Gathers of changed parameters over the axis between groups, for one bucket.

    What is gathered into holds the parameters before the change, with the same bits on all ranks. What rounding leaves
    is in the next difference, for it stays between the masters and the parameters.
    """

    ring: Ring
    blocks: Blocks
    values: Tensor  # my slice of the master weights

    def all_gather_(self, whole: Tensor) -> None:
        """Add the changes of all ranks to all parts, mine too."""
        parts = whole.view(self.ring.width, -1)
        coded = torch.empty(self.ring.width, self.blocks.nbytes(parts.shape[1]), dtype=torch.uint8)
        me = self.ring.me
        for master, held, piece in self.blocks.pieces(self.values, parts[me], payload=coded[me]):
            self.blocks.encode_(master - held, piece)
        self.ring.all_gather_(coded.unbind(0))
        for part, payload in zip(parts.unbind(0), coded.unbind(0), strict=True):
            for into, piece in self.blocks.pieces(part, payload=payload):
                into.add_(self.blocks.decoded(piece, into.numel()))

    def reduce_scatter_(self, whole: Tensor) -> None:
        """There is none: parameters are not summed."""
        raise AssertionError(whole.shape)

    def all_reduce_(self, whole: Tensor) -> None:
        """There is none: parameters are not summed."""
        raise AssertionError(whole.shape)
