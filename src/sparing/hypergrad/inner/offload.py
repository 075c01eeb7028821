"""Stored states outside of the run's memory: in main memory for a run on a device, or in a file that has no name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.trees import Tree, leaves, rebuild
from sparing.memory import format_bytes

Offload = Literal["cpu"] | str | Path | None


class Store:
    """Keeps bytes elsewhere, and counts them."""

    def __init__(self) -> None:
        self.held = self.peak = 0  # bytes now, and at most

    def put(self, part: Tensor) -> int:
        """Keep a vector of uint8; returns its place."""
        place = self._write(part)
        self.held += part.numel()
        self.peak = max(self.peak, self.held)
        return place

    def get(self, place: int, count: int, device: torch.device) -> Tensor:
        """The ``count`` bytes at a place, on a device."""
        return self._read(place, count, device)

    def drop(self, place: int, count: int) -> None:
        """Forget them."""
        self.held -= count
        self._free(place, count)

    def close(self) -> None:
        """Give back what is held."""

    def _write(self, part: Tensor) -> int:
        return 0

    def _read(self, place: int, count: int, device: torch.device) -> Tensor:
        # counts alone, for predictions on fake tensors
        return torch.empty(count, dtype=torch.uint8, device=device)

    def _free(self, place: int, count: int) -> None:
        pass


class MainMemory(Store):
    """In the memory of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, Tensor] = {}
        self._next = 0

    def _write(self, part: Tensor) -> int:
        self._next += 1
        # a copy also where the run is on the host itself
        self._parts[self._next] = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        return self._next

    def _read(self, place: int, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=device).copy_(self._parts[place])

    def _free(self, place: int, count: int) -> None:
        del self._parts[place]


class File(Store):
    """In a file of a folder, which has no name there and so is gone with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by ``close``
        except OSError as failure:
            raise UserError(
                "offload", got=str(folder), why=f"no file can be made there ({failure.strerror})",
                do="pass a folder that exists and can be written",
            ) from failure  # fmt: skip
        self._end = 0
        self._gaps: dict[int, list[int]] = {}  # bytes -> places of that size that are free again

    def close(self) -> None:
        """Close the file; its room on the disk is free again."""
        self._file.close()

    def _write(self, part: Tensor) -> int:
        count = part.numel()
        gaps = self._gaps.get(count)
        place = gaps.pop() if gaps else self._end
        view = memoryview(part.cpu().numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < count:  # one call writes 2 GiB at most
                done += os.pwrite(self._file.fileno(), view[done:], place + done)
        except OSError as failure:
            raise UserError(
                "offload", got=f"{self._folder} with {format_bytes(self.held)} of states in it",
                why=f"no more can be written there ({failure.strerror})",
                do="pass a folder on a larger disk, or use Checkpointed(states=...) with fewer states",
            ) from failure  # fmt: skip
        self._end = max(self._end, place + count)
        return place

    def _read(self, place: int, count: int, device: torch.device) -> Tensor:
        part = torch.empty(count, dtype=torch.uint8)
        view, done = memoryview(part.numpy()), 0  # type: ignore[arg-type]
        while done < count:
            got = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if not got:
                raise OSError(f"the file in {self._folder} ended at byte {place + done} of {self._end}")
            done += got
        return part.to(device)

    def _free(self, place: int, count: int) -> None:
        self._gaps.setdefault(count, []).append(place)


def check_offload(offload: Offload) -> None:
    """Refuse anything but "cpu", a folder or None."""
    if offload is not None and not isinstance(offload, str | Path):
        raise UserError("offload", got=offload, why="it is a place", do='pass "cpu", a folder, or None')


@contextlib.contextmanager
def opened(offload: Offload, device: torch.device) -> Iterator[Store | None]:
    """The store that a setting names, for a run on a device."""
    if offload is None:
        yield None
        return
    if offload == "cpu" and device.type == "cpu":
        raise UserError(
            "offload", got='"cpu" for a run on the CPU', why="its states lie in main memory already",
            do="pass a folder, or None",
        )  # fmt: skip
    store = MainMemory() if offload == "cpu" else File(Path(str(offload)))
    try:
        yield store
    finally:
        store.close()


def place_of(offload: Offload) -> str:
    """A few words for the name of a method."""
    return "" if offload is None else ", states in main memory" if offload == "cpu" else ", states on disk"


class Snapshot:
    """A state in a store."""

    def __init__(self, store: Store, state: Tree) -> None:
        self._store, self._like = store, [_layout(leaf) for leaf in leaves(state)]
        self._nest = rebuild(state, [torch.empty(0) for _ in self._like])
        self._places = [store.put(_bytes(leaf)) for leaf in leaves(state)]

    def load(self) -> Tree:
        """The state, in new memory."""
        parts = zip(self._places, self._like, strict=True)
        return rebuild(self._nest, [_view(self._store.get(place, one.count, one.device), one) for place, one in parts])

    def drop(self) -> None:
        """Forget it."""
        for place, one in zip(self._places, self._like, strict=True):
            self._store.drop(place, one.count)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its bytes."""

    count: int  # bytes
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]


def _layout(leaf: Tensor) -> Layout:
    span = 1 + sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True)) if leaf.numel() else 0
    return Layout(span * leaf.element_size(), leaf.dtype, leaf.device, leaf.shape, leaf.stride())


def _bytes(leaf: Tensor) -> Tensor:
    """The memory that a tensor spans, as a vector of uint8."""
    one, leaf = _layout(leaf), leaf.detach()
    span = one.count // leaf.element_size()
    return leaf.as_strided((span,), (1,), leaf.storage_offset()).view(torch.uint8)


def _view(part: Tensor, one: Layout) -> Tensor:
    return part.view(one.dtype).as_strided(one.shape, one.stride)
