"""Flat buckets: the parameters of a block in one tensor, of which every rank keeps a slice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.sharding.engine.freed import FREED_VERSION, GradientTaken, freed_classes, swap_versions_
from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.mesh import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a parameter lies in its bucket."""

    name: str  # canonical, as ``named_parameters`` of the blocks gives it
    shape: torch.Size
    offset: int  # first element in the flat tensor
    numel: int
    group: int  # index of its parameter group


def slots_of(params: Mapping[str, nn.Parameter], groups: Mapping[str, int]) -> tuple[Slot, ...]:
    """Lay parameters out without gaps, in the order of their groups and then of ``params``."""
    found, offset = [], 0
    # Parameters of a group lie together, so that the optimizer sees one flat tensor of each; sorted is stable.
    for name in sorted(params, key=lambda name: groups.get(name, 0)):
        parameter = params[name]
        slot = Slot(name=name, shape=parameter.shape, offset=offset, numel=parameter.numel(), group=groups.get(name, 0))
        found.append(slot)
        offset += slot.numel
    return tuple(found)


class Bucket:
    """Parameters of one block that train, or do not, together: whole in ``full`` while they are used, else a slice.

    ``store`` is the slice at the level of the parameters. Where that is the whole tensor, ``full`` is ``store`` and
    stays; elsewhere the bytes of ``full`` exist between ``unshard_`` and ``reshard_``, and in between every parameter
    has its right shape and refuses to be read, so that a use at the wrong time is said.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        *,
        block: str,
        groups: Mapping[str, int],
        mesh: Mesh,
        level: int,
        dtype: torch.dtype,
        trainable: bool,
        root: bool,
    ) -> None:
        """Copy the parameters into a flat tensor, make their ``data`` views of it, and cut it."""
        self.name, self.block, self.mesh, self.level, self.dtype = name, block, mesh, level, dtype
        self.may_train = self.trainable = trainable
        self.root = root
        self.slots = slots_of(params, groups)
        self.params: tuple[nn.Parameter, ...] = tuple(params[slot.name] for slot in self.slots)
        self.layout = mesh.layout(sum(slot.numel for slot in self.slots))
        self.pending: Handle[Tensor] | None = None  # what must end before ``store`` is read; ``set_pending_`` sets it
        self.taken = False  # whether gradients of a step under way were taken from the parameters
        self._kinds = [type(parameter) for parameter in self.params]
        self._freed = freed_classes(name, self._await_pending_)
        self.pinned = False  # whether ``reshard_`` must wait, for a user who looks at whole parameters
        self._gathering: Handle[Tensor] | None = None
        self.full = torch.zeros(self.layout.padded, dtype=dtype, device=self.params[0].device)
        for slot, parameter in zip(self.slots, self.params, strict=True):
            self.full.narrow(0, slot.offset, slot.numel).copy_(parameter.data.reshape(-1))
        # A tensor of a parameter's shape that takes no memory and reads as NaN.
        nothing = self.full.new_full((), float("nan") if self.full.is_floating_point() else 0)
        self._placeholders = [nothing.clone().expand(slot.shape) for slot in self.slots]
        self._views = [self.full.narrow(0, slot.offset, slot.numel).view(slot.shape) for slot in self.slots]
        self._bytes = self.full.untyped_storage().nbytes()
        # inference tensors have no version counter, and autograd saves none of them
        self._versioned = tuple(p for p in self.params if not p.is_inference())
        self._versions = [parameter._version for parameter in self._versioned]
        self._kept = list(self._versions)  # those at which ``store`` has what the whole tensor has
        self.store = self.full
        self.set_views_()
        self.keep_slice_()

    @property
    def whole(self) -> bool:
        """Whether ``store`` is the whole tensor, so that nothing is unsharded or freed."""
        return self.layout.size(self.level) == self.layout.padded

    @property
    def unsharded(self) -> bool:
        """Whether ``full`` holds bytes, or will when its collective ends."""
        return self.store is self.full or self.full.untyped_storage().nbytes() > 0

    def keep_slice_(self) -> None:
        """Keep the slice of ``level`` of the whole tensor, which must be unsharded, and free the rest."""
        if self.whole:
            self.store = self.full
            return
        offset, length = self.layout.slice(self.level, self.mesh.coords)
        self.store = self.full.narrow(0, offset, length).clone()
        self.note_kept_()
        self.reshard_()

    def relevel_(self, level: int) -> None:
        """Keep the slice of another level; every rank must call."""
        self.wait_pending_()
        self.unshard_()
        self.wait_unsharded_()
        self.level = level
        self.keep_slice_()

    def set_views_(self) -> None:
        """Let the parameters be views of the whole tensor."""
        self._set_classes_()
        for parameter, view in zip(self.params, self._views, strict=True):
            parameter.data = view
        swap_versions_(self._versioned, self._versions)
        self.note_kept_()

    def note_kept_(self) -> None:
        """Take what was written into the parameters for kept in ``store``, or for dropped on purpose."""
        self._kept = [parameter._version for parameter in self._versioned]

    @property
    def moved(self) -> bool:
        """Whether the user gave a whole parameter other memory, which no step would change."""
        seen = zip(self.params, self._views, strict=True)
        return self.store is self.full and not self.pending and any(p.data_ptr() != v.data_ptr() for p, v in seen)

    def mark_taken_(self, taken: bool) -> None:
        """Say whether the engine holds gradients of the parameters."""
        self.taken = taken
        self._set_classes_()

    def set_pending_(self, handle: Handle[Tensor]) -> None:
        """Note the collective that writes into ``store``; whoever reads a parameter before it ends, waits."""
        self.pending = handle
        self._set_classes_()

    def restore_classes_(self) -> None:
        """Leave the parameters as ``shard_`` found them, but for their values."""
        for parameter, kind in zip(self.params, self._kinds, strict=True):
            parameter.__class__ = kind

    def _set_classes_(self) -> None:
        """Set the class of the parameters to what may be done with them now."""
        late = self.pending if self.store is self.full else self._gathering
        here = self.unsharded and late is None
        for parameter, kind in zip(self.params, self._kinds, strict=True):
            parameter.__class__ = (GradientTaken if self.taken else kind) if here else self._freed[self.taken]

    def _await_pending_(self) -> bool:
        """Wait for values that come without anybody asking; whether they did."""
        if self.store is self.full:
            self.wait_unsharded_()
        return self.store is self.full

    def unshard_(self) -> None:
        """Start to make the tensor whole; the collective runs on the lanes."""
        if self.unsharded:
            return
        # The storage grows in place, so views that autograd or users hold stay valid.
        self.full.untyped_storage().resize_(self._bytes)
        offset, length = self.layout.slice(self.level, self.mesh.coords)
        mine, pending = self.full.narrow(0, offset, length), self.pending
        # The copy of my slice runs on the lane that gathers first: nothing else may read the slice before.
        first = next(self.mesh.lanes[axis] for axis in reversed(range(self.level)) if self.mesh.sizes[axis] > 1)

        def fill() -> None:
            if pending is not None:
                pending.wait()
            mine.copy_(self.store)

        # All ranks compare the log, and buckets of the same size would look the same without their names.
        self.mesh.transitions.log.mark(self.name)
        filled = first.submit(fill)
        self._gathering = self.mesh.transitions.gather_(self.full, self.level, 0, after=filled)

    def wait_unsharded_(self) -> None:
        """Wait until the tensor is whole, and point the parameters at it."""
        if self.pending is not None and self.store is self.full:
            self.wait_pending_()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.set_views_()

    def store_edits_(self) -> None:
        """Take changes of the whole tensor into the store."""
        if self.store is not self.full:
            offset, length = self.layout.slice(self.level, self.mesh.coords)
            self.store.copy_(self.full.narrow(0, offset, length))
            self.note_kept_()

    def reshard_(self) -> None:
        """Drop the whole tensor's bytes; nothing happens where it is the store or pinned."""
        if self.store is self.full or self.pinned or not self.unsharded:
            return
        # one that was gathered ahead and not used is not at its own versions
        shown = self._gathering is None
        # A lane may still write into the storage that is about to go.
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.restore_classes_()
        for parameter, placeholder in zip(self.params, self._placeholders, strict=True):
            parameter.data = placeholder
        if shown:
            self._versions = swap_versions_(self._versioned, [FREED_VERSION] * len(self._versioned))
        lost = shown and self._versions != self._kept and self._differs()
        self.full.untyped_storage().resize_(0)
        self._set_classes_()
        # once all is freed, so that the engine can go on
        why, do = "only a slice is kept, and the change would be lost", "write inside engine.gathered(), on every rank"
        require(not lost, self.name, "weights written while they were whole for a pass", why, do)

    def _differs(self) -> bool:
        """Whether the whole tensor has other bits than ``store``."""
        mine = self.full.narrow(0, *self.layout.slice(self.level, self.mesh.coords))
        return not torch.equal(mine.view(torch.uint8), self.store.view(torch.uint8))

    def raise_versions_(self, places: Collection[int] | None = None) -> None:
        """Have autograd refuse graphs that saved parameters at these places, or any, before their values changed."""
        # a step writes into the store, whose version counter is not that of the parameters
        changed = {id(p) for at, p in enumerate(self.params) if places is None or at in places}
        more = [id(parameter) in changed for parameter in self._versioned]
        if self.store is self.full or (self.unsharded and self._gathering is None):
            held = [parameter._version for parameter in self._versioned]
            swap_versions_(self._versioned, [version + one for version, one in zip(held, more, strict=True)])
            self._kept = [version + one for version, one in zip(self._kept, more, strict=True)]
        else:
            # those that they will have when they are here again
            self._versions = [version + one for version, one in zip(self._versions, more, strict=True)]

    def wait_pending_(self) -> None:
        """Wait for what still writes into ``store``."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            self._set_classes_()

    def unflatten(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Canonical name and view of each parameter in a flat tensor laid out as this bucket."""
        for slot in self.slots:
            yield slot.name, flat.narrow(0, slot.offset, slot.numel).view(slot.shape)

    def overlaps(self, level: int, mesh: Mesh | None = None) -> Iterator[tuple[int, int, int, int]]:
        """What of each parameter lies in my slice: (its index, first element in it, first in the slice, elements).

        Slices are those of ``mesh``; none: of the bucket's own.
        """
        mesh = mesh or self.mesh
        begin, length = mesh.layout(self.layout.length).slice(level, mesh.coords)
        for index, slot in enumerate(self.slots):
            low, high = max(slot.offset, begin), min(slot.offset + slot.numel, begin + length)
            if low < high:
                yield index, low - slot.offset, low - begin, high - low

    def ranges(self, level: int, *, fine: bool = False) -> list[tuple[int, int, int]]:
        """(group, offset in my slice, elements) of every parameter group, or with ``fine`` of every parameter.

        Elements may be 0; padding belongs to the last range.
        """
        begin, length = self.layout.slice(level, self.mesh.coords)
        starts: dict[int, tuple[int, int]] = {}
        for index, slot in enumerate(self.slots):
            starts.setdefault(index if fine else slot.group, (slot.group, slot.offset))
        ends = [*[offset for _, offset in list(starts.values())[1:]], self.layout.padded]
        found = []
        for (group, start), end in zip(starts.values(), ends, strict=True):
            low, high = max(start, begin), min(end, begin + length)
            found.append((group, min(max(low - begin, 0), length), max(high - low, 0)))
        return found
