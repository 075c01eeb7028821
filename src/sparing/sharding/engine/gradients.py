"""Gradients of a bucket: whole while its block runs backward, a slice between micro-steps, complete after the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.lowbit.wires import GradientWires
from sparing.sharding.network.lanes import Handle


class Gradients:
    """Collects the gradients of one trainable bucket and reduces them on the way to the optimizer.

    A backward pass fills ``buffer``; ``flush_`` sums it over the ranks that share my slice at the level of the
    gradients, and adds the slice to ``acc``. After the last micro-step ``sync_`` makes the slice at the level of the
    optimizer complete. Where the gradients stay whole, the buffer is the accumulator itself and nothing is sent
    before the last step. A parameter without gradient counts as zero, on every rank.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        level: int,
        optimizer_level: int,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        slow: GradientWires | None = None,
    ) -> None:
        self.bucket, self.level, self.optimizer_level = bucket, level, optimizer_level
        self._slow = slow  # of the outermost axis; None: as the other axes
        self.dtype, self.wire_dtype = dtype, wire_dtype
        self.acc: Tensor | None = None  # sum over micro-steps, at ``level``
        self.flushed = False  # whether ``flush_`` has run in this backward pass
        self.used: set[int] = set()  # parameters that had a gradient since the last step
        self._buffer: Tensor | None = None
        self._received: set[int] = set()
        self._flushes = 0
        self._reduction: Handle[Tensor] | None = None
        self._finish_sync: Callable[[], Handle[Tensor]] | None = None
        self._synced: Handle[Tensor] | None = None

    @property
    def whole(self) -> bool:
        """Whether the accumulator is whole, so that gradients are added to it directly."""
        return self.bucket.layout.size(self.level) == self.bucket.layout.padded

    @property
    def received(self) -> bool:
        """Whether a gradient has come since the last ``flush_``."""
        return bool(self._received)

    @property
    def synced(self) -> bool:
        """Whether ``sync_`` has run since the last step."""
        return self._finish_sync is not None

    def collect_(self, index: int, grad: Tensor) -> None:
        """Take the gradient of the parameter at a position of the bucket."""
        if self.synced:
            name = self.bucket.slots[index].name
            raise UserError(
                "loss", got=f"a gradient of {name} after those of its block had left",
                why="the loss used it before the block ran, and autograd goes backwards",
                do="compute penalties on weights after the forward pass",
            )  # fmt: skip
        place, slot = self._target(), self.bucket.slots[index]
        # Sparse embeddings: the buffer is dense, and an elementwise step on zeros is the same.
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        part, values = place.narrow(0, slot.offset, slot.numel), dense.reshape(-1)
        # A reentrant checkpoint hands over one gradient for every use of the parameter.
        if (self.whole and self._flushes) or index in self._received:
            part.add_(values)
        else:
            part.copy_(values)
        self._received.add(index)
        self.used.add(index)

    def _target(self) -> Tensor:
        if self.whole:
            return self._accumulator()
        if self._buffer is None:
            self._buffer = self._empty(self.bucket.layout.padded, self.wire_dtype)
        return self._buffer

    def _accumulator(self) -> Tensor:
        if self.acc is None:
            self.acc = self._empty(self.bucket.layout.size(self.level), self.dtype)
        return self.acc

    def _empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor whose padding is zero."""
        made = torch.empty(length, dtype=dtype, device=self.bucket.store.device)
        end = self.bucket.layout.length
        if length > end:
            made.narrow(0, end, length - end).zero_()
        return made

    def _zero_missing_(self) -> None:
        if self.whole and self._flushes:
            return
        place = self._target()
        for index, slot in enumerate(self.bucket.slots):
            if index not in self._received:
                place.narrow(0, slot.offset, slot.numel).zero_()

    def flush_(self) -> Handle[Tensor] | None:
        """Start to reduce the gradients of a backward pass; done when the buffer is free. None: nothing to send."""
        self.bucket.mesh.transitions.log.mark(self.bucket.name)
        self._zero_missing_()
        self._received.clear()
        self.flushed = True
        # Buffers are not zeroed: the first sum is copied over whatever the accumulator holds.
        first, self._flushes = self._flushes == 0, self._flushes + 1
        if self.whole:
            return None
        acc = self._accumulator()
        assert self._buffer is not None
        self._reduction = self.bucket.mesh.transitions.reduce_step(
            self._buffer, self.level, then=acc.copy_ if first else acc.add_, slow=self._slow_wires()
        )
        self._buffer = None
        return self._reduction

    def sync_(self) -> None:
        """After the last micro-step: start to make the optimizer's slice complete; ``complete_`` ends it."""
        assert self._finish_sync is None
        part, after, mesh = self._accumulator(), self._reduction, self.bucket.mesh
        mesh.transitions.log.mark(self.bucket.name)
        # Ranks inside ``level`` hold other slices; only axes beyond it still have something to add.
        lanes = [mesh.lanes[axis] for axis in range(self.level, mesh.tiers) if mesh.sizes[axis] > 1]
        if self.wire_dtype == self.dtype or not lanes:
            self._finish_sync = mesh.transitions.sync_out(
                part, self.level, self.optimizer_level, after=after, slow=self._slow_wires()
            )
            return
        # The accumulator may be wider than the wire. Conversion waits for the last reduction, so it runs on a lane.
        wire = torch.empty_like(part, dtype=self.wire_dtype)

        def convert() -> None:
            if after is not None:
                after.wait()
            wire.copy_(part)

        mine = mesh.transitions.slice(part, self.level, self.optimizer_level)
        self._finish_sync = mesh.transitions.sync_out(
            wire, self.level, self.optimizer_level, after=lanes[0].submit(convert), then=mine.copy_
        )

    def _slow_wires(self) -> GradientWires | None:
        """Low-bit wires that know which parameters have had no gradient here in this step."""
        if self._slow is None or len(self.used) == len(self.bucket.slots):
            return self._slow
        cut, whole = (
            [(at, length) for index, _, at, length in self.bucket.overlaps(level) if index not in self.used]
            for level in (self.bucket.mesh.tiers - 1, self.bucket.mesh.tiers)
        )
        return dataclasses.replace(self._slow, unused=cut, unused_mine=whole)

    def complete_(self) -> None:
        """Queue what ``sync_`` left; after all buckets have called it, and in the same order on all ranks."""
        if self._synced is None and self._finish_sync is not None:
            self._synced = self._finish_sync()

    def take(self) -> Tensor:
        """Wait for the sum over ranks and micro-steps: my slice at the optimizer's level, valid until ``reset_``."""
        assert self._synced is not None
        return self._synced.wait()

    def reset_(self) -> None:
        """Free everything, for the next step."""
        self.complete_()
        for handle in (self._reduction, self._synced):
            if handle is not None:
                handle.wait()
        self.acc = self._buffer = self._reduction = self._finish_sync = self._synced = None
        self._received.clear()
        self.used.clear()
        self._flushes = 0
