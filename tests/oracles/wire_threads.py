"""Ranks as threads of one process, with queues for a network; and what every collective must give, from dense sums."""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from patience import PATIENCE
from sparing.sharding.network.mesh import NAMES, Mesh
from sparing.sharding.network.rings import Axis
from sparing.sharding.network.wires import Wires

CPU = torch.device("cpu")


class Done:
    """A message that has left."""

    def wait(self) -> None:
        return


class Receipt:
    """A message that will come."""

    def __init__(self, box: queue.SimpleQueue[Tensor], into: Tensor) -> None:
        self.box, self.into = box, into

    def wait(self) -> None:
        message = self.box.get(timeout=PATIENCE)
        assert message.numel() == self.into.numel()
        assert message.dtype == self.into.dtype
        self.into.copy_(message)


class Party:
    """A process group whose network is a box per pair of ranks and tag."""

    def __init__(self, boxes: defaultdict[Any, queue.SimpleQueue[Tensor]], me: int) -> None:
        self.boxes, self.me = boxes, me

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Done:
        self.boxes[self.me, to, tag].put(tensors[0].clone())
        return Done()

    def recv(self, tensors: Sequence[Tensor], frm: int, tag: int) -> Receipt:
        return Receipt(self.boxes[frm, self.me, tag], tensors[0])


class Boxes(defaultdict[Any, Any]):
    """Boxes made on demand by any thread."""

    def __init__(self) -> None:
        super().__init__(queue.SimpleQueue)
        self.lock = threading.Lock()

    def __getitem__(self, key: object) -> Any:
        with self.lock:
            return super().__getitem__(key)


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank // math.prod(sizes[:k]) % w for k, w in enumerate(sizes))


def meshes(sizes: Sequence[int], wires: Wires | None = None) -> list[Mesh]:
    """One mesh per rank, joined by boxes."""
    world = math.prod(sizes)
    networks: dict[Any, Boxes] = defaultdict(Boxes)
    made = []
    for rank in range(world):
        axes = []
        for k, w in enumerate(sizes):
            line = tuple(
                other
                for other in range(world)
                if all(
                    a == b
                    for q, (a, b) in enumerate(zip(coordinates(other, sizes), coordinates(rank, sizes), strict=True))
                    if q != k
                )
            )
            index = line.index(rank)
            group = cast(Any, Party(networks[k, line], index) if w > 1 else None)
            axes.append(Axis(name=NAMES[len(sizes)][k], size=w, index=index, ranks=line, group=group))
        flat = cast(Any, Party(networks["world"], rank))
        made.append(Mesh(axes, rank, CPU, wires or Wires(), None, flat))
    return made


def together(work: Callable[[Mesh], Any], all_meshes: Sequence[Mesh]) -> list[Any]:
    """What each rank's thread returns; the first error of any."""
    found: list[Any] = [None] * len(all_meshes)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            found[place] = work(all_meshes[place])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(all_meshes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mesh in all_meshes:
        mesh.close()
    if errors:
        raise errors[0]
    return found


def value(rank: int, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers that differ by rank and place, so that all sums are exact in every type."""
    return ((torch.arange(length) * 7 + rank * 3 + torch.arange(length) // 5) % 11).to(dtype)


def part_of(full: Tensor, level: int, coords: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A slice by reshaping: innermost axis first, each coordinate an index."""
    return full.reshape(*sizes, -1)[tuple(coords[:level])].flatten()


def gathered(rank: int, sizes: Sequence[int], length: int, to: int) -> Tensor:
    """A gather's result where all ranks hold slices of the tensor of rank 0."""
    return part_of(value(0, length), to, coordinates(rank, sizes), sizes)


def reduced(rank: int, sizes: Sequence[int], length: int, level: int) -> Tensor:
    """Sum over the ranks with my outer coordinates, of my slice."""
    me, world = coordinates(rank, sizes), math.prod(sizes)
    peers = [q for q in range(world) if coordinates(q, sizes)[level:] == me[level:]]
    return part_of(torch.stack([value(q, length) for q in peers]).sum(0), level, me, sizes)


def synced(rank: int, sizes: Sequence[int], length: int, frm: int, to: int) -> Tensor:
    """Sum over the ranks with my inner coordinates of their slices, cut to my finer one."""
    me, world = coordinates(rank, sizes), math.prod(sizes)
    peers = [q for q in range(world) if coordinates(q, sizes)[:frm] == me[:frm]]
    total = torch.stack([value(q, length) for q in peers]).sum(0)
    return part_of(total, to, me, sizes)


def do_gather(mesh: Mesh, length: int, frm: int, to: int) -> Tensor:
    out = torch.full((length // math.prod(mesh.sizes[:to]),), -1.0, dtype=torch.float64)
    mesh.transitions.slice(out, to, frm).copy_(part_of(value(0, length), frm, mesh.coords, mesh.sizes))
    return mesh.transitions.gather_(out, frm, to).wait().clone()


def do_reduce(mesh: Mesh, length: int, level: int) -> Tensor:
    return mesh.transitions.reduce_step(value(mesh.rank, length), level).wait().clone()


def do_sync(mesh: Mesh, length: int, frm: int, to: int) -> Tensor:
    mine = part_of(value(mesh.rank, length), frm, mesh.coords, mesh.sizes).clone()
    return mesh.transitions.sync(mine, frm, to).wait().clone()


def every(tiers: int) -> list[tuple[str, int, int]]:
    """All legal moves: kind, from, to."""
    levels = range(tiers + 1)
    gathers = [("gather", frm, to) for frm in levels for to in range(frm + 1)]
    reductions = [("reduce", 0, level) for level in levels]
    return gathers + reductions + [("sync", frm, to) for frm in levels for to in range(frm, tiers + 1)]


def do(mesh: Mesh, length: int, move: tuple[str, int, int]) -> Tensor:
    kind, frm, to = move
    if kind == "gather":
        return do_gather(mesh, length, frm, to)
    return do_reduce(mesh, length, to) if kind == "reduce" else do_sync(mesh, length, frm, to)


def truth(rank: int, sizes: Sequence[int], length: int, move: tuple[str, int, int]) -> Tensor:
    kind, frm, to = move
    if kind == "gather":
        return gathered(rank, sizes, length, to)
    return reduced(rank, sizes, length, to) if kind == "reduce" else synced(rank, sizes, length, frm, to)


def elements(sizes: Sequence[int], length: int, move: tuple[str, int, int]) -> list[int]:
    """Elements that each rank sends along each axis, by the closed forms."""
    kind, frm, to = move
    inside = [length // math.prod(sizes[:k]) for k in range(len(sizes) + 1)]
    once = [(w - 1) * inside[k] // w for k, w in enumerate(sizes)]
    if kind == "gather":
        return [once[k] if to <= k < frm else 0 for k in range(len(sizes))]
    if kind == "reduce":
        return [once[k] if k < to else 0 for k in range(len(sizes))]
    # beyond `to` every axis reduces and gathers what is left inside the coarser slice
    return [once[k] if frm <= k < to else 2 * once[k] if k >= to else 0 for k in range(len(sizes))]
