"""Gradients of a ``fully_shard`` unit on their way to the optimizer: summed over ranks and micro-steps by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from sparing.sharding.fsdp.collectives import nested
from sparing.sharding.fsdp.rows import Cut, rows_of
from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.mesh import Mesh


class Sums:
    """What ``fully_shard`` hands over in micro-steps, until it is complete at the level of the optimizer.

    ``fully_shard`` cuts rows over the ``shard_level`` inner axes. The accumulator is at the level of the gradients, in
    the order of nested slices; where the optimizer's level is finer than ``shard_level``, rows are cut once more.
    With a ``home``, the accumulator waits there between micro-steps, and the complete sum is there.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        levels: tuple[int, int],
        shard_level: int,
        cut: Cut,
        finer: Cut,
        *,
        home: torch.device | None = None,
    ) -> None:
        self.name, self.mesh, self.shard_level, self.home = name, mesh, shard_level, home
        self.level, self.optimizer_level = levels  # of gradients and of optimizer state
        self.cut, self.finer = cut, finer  # rows over the shard level's ranks; mine of those over the outer ones
        self.acc: Tensor | None = None  # sum over micro-steps, at ``level``
        self.synced: Handle[Tensor] | None = None
        self._reduction: Handle[Tensor] | None = None

    @property
    def packs(self) -> bool:
        """Whether rows are cut once more for the optimizer."""
        return self.optimizer_level > self.shard_level

    def take_(self, whole: Tensor) -> Handle[Tensor] | None:
        """Add the gradients of a backward pass, by rank; done when they have left. None: nothing is sent."""
        moving, ranks = self.mesh.transitions, self.mesh.sizes[: self.shard_level]
        moving.log.mark(self.name)
        full = nested(whole, ranks)
        if self.level == 0:
            self.acc = full if self.acc is None else self.acc.add_(full)
            return None
        first, inner = self.acc is None, min(self.level, self.shard_level)
        if self.level > self.shard_level:
            self.acc = full.new_empty(self.finer.size, device=self.home) if self.acc is None else self.acc
            packed = self._packed(full)
            packing = moving.reduce_step(full, inner, then=lambda part: self._pack_(packed, part))
            self._reduction = moving.sync(
                packed, inner, self.level, after=packing, then=self._into(self.acc, first=first)
            )
            return self._reduction
        size = full.numel() // prod(self.mesh.sizes[:inner])
        if self.acc is None:
            # zeros behind, where the outer ranks share what is kept: ``sync_`` sums it over them
            self.acc = full.new_zeros(size + -size % prod(self.mesh.sizes[inner:]), device=self.home)
        self._reduction = moving.reduce_step(full, inner, then=self._into(self.acc.narrow(0, 0, size), first=first))
        return self._reduction

    def _into(self, acc: Tensor, *, first: bool) -> Callable[[Tensor], Tensor]:
        """How a part is added to the accumulator, which may be on another device."""
        if self.home is None:
            return acc.copy_ if first else acc.add_
        return acc.copy_ if first else lambda part: acc.add_(part.to(acc.device))

    def _here(self) -> Tensor:
        """The accumulator where collectives can send it."""
        assert self.acc is not None
        if self.home is not None:
            # the copy into it has ended: copies to main memory that is not pinned block
            self.acc = self.acc.to(self.mesh.device)
        return self.acc

    def sync_(self) -> None:
        """After the last micro-step: start to complete the sum at the optimizer's level."""
        if self.acc is None or self.synced is not None:
            return
        moving, shard, after = self.mesh.transitions, self.shard_level, self._reduction
        moving.log.mark(self.name)
        if self.level > shard:
            self.synced = after
        elif shard == self.mesh.tiers:
            self.synced = moving.sync(self._here(), self.level, shard, after=after)
        elif self.packs:
            packed = self._packed(self._here())
            reduced = self._to_shard(packed, after)
            self.synced = moving.sync(packed, shard, self.optimizer_level, after=reduced)
        else:
            self._share_(after)

    def _to_shard(self, packed: Tensor, after: Handle[Tensor] | None) -> Handle[Tensor] | None:
        """Bring the accumulator to the shard level, and its rows into the order of the outer ranks."""
        assert self.acc is not None
        moving, acc = self.mesh.transitions, self.acc
        if self.level < self.shard_level:
            return moving.reduce_step(acc, self.shard_level, after=after, then=lambda part: self._pack_(packed, part))
        if after is None or after.done():
            return Handle.of(self._pack_(packed, acc if after is None else after.wait()))
        lane = self.mesh.lanes[self.shard_level]
        return lane.submit(lambda: self._pack_(packed, after.wait()))

    def _share_(self, after: Handle[Tensor] | None) -> None:
        """Sum over the outer axes what all of them keep."""
        moving, shard, acc = self.mesh.transitions, self.shard_level, self._here()
        if self.level == shard and self.level > 0:
            self.synced = moving.sync(acc, shard, shard, after=after)
            return
        size = acc.numel() // prod(self.mesh.sizes[:shard])
        outer = prod(self.mesh.sizes[shard:])
        if size % outer == 0:
            reduced = moving.reduce_step(acc, shard, after=after)
            self.synced = moving.sync(moving.slice(acc, 0, shard), shard, shard, after=reduced)
            return
        shared = acc.new_zeros(size + -size % outer)
        reduced = moving.reduce_step(acc, shard, after=after, then=shared.narrow(0, 0, size).copy_)
        self.synced = moving.sync(shared, shard, shard, after=reduced)

    def _packed(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.finer.ranks * self.finer.size)

    def _pack_(self, packed: Tensor, part: Tensor) -> Tensor:
        return self.finer.pack_(packed, list(self.cut.views(part)))

    def result(self) -> Tensor | None:
        """Wait for the complete flat sum at the optimizer's level; None if no gradient came in this step."""
        if self.synced is None:
            return None
        found = self.synced.wait()
        if self.home is not None and found.device != self.home:
            found = found.to(self.home)
            # or the device would keep all sums until the step ends
            self.acc, self._reduction, self.synced = None, None, Handle.of(found)
        return found

    def own(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """The optimizer's rows of whole parameters, as views."""
        rows = self.cut.own(whole)
        return self.finer.own(rows) if self.packs else rows

    def views(self, flat: Tensor) -> list[Tensor]:
        """My rows of every parameter in it."""
        return list((self.finer if self.packs else self.cut).views(flat))

    def reset_(self) -> None:
        """Free everything, for the next step."""
        for handle in (self._reduction, self.synced):
            if handle is not None:
                handle.wait()
        self.acc = self._reduction = self.synced = None


def cuts(mesh: Mesh, shapes: tuple[torch.Size, ...], shard_level: int) -> tuple[Cut, Cut]:
    """How ``fully_shard`` cuts rows over the inner axes, in the order of ranks, and how mine are cut over the outer."""
    inner = prod(mesh.sizes[:shard_level])
    whole = tuple(tuple(shape) for shape in shapes)
    cut = Cut(whole, inner, mesh.rank % inner, tuple(shape[0] for shape in whole))
    most = tuple(rows_of(shape[0], inner, 0)[1] for shape in whole)
    return cut, Cut(cut.mine, mesh.world // inner, mesh.rank // inner, most)
