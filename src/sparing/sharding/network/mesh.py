"""Ranks arranged along axes of the network, innermost and fastest first: groups, lanes, counters and a way to meet."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sparing.errors import require
from sparing.sharding.layout import Layout, block_index, coords_of
from sparing.sharding.network.device_meshes import check_beside, meet, per_machine, ranks_of
from sparing.sharding.network.lanes import Lane, yielding
from sparing.sharding.network.rendezvous import join, launched
from sparing.sharding.network.rings import Axis, Counter, Ring
from sparing.sharding.network.routes import Flat, Overlapped, TwoLevel
from sparing.sharding.network.streams import StreamLane
from sparing.sharding.network.transitions import Transitions
from sparing.sharding.network.wires import Collectives, RingCollectives, Wires, collectives_of
from sparing.sharding.planner.config import NAMES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """All axes, and what runs on them; ``make_mesh`` makes one.

    Close it before the process group is destroyed; it is a context manager that does.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        rank: int,
        device: torch.device,
        wires: Wires,
        control: ProcessGroup | None = None,
        flat: ProcessGroup | None = None,
        patience: timedelta | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._flat, self.patience = flat, patience  # how long one message may take; None: as torch has it
        self._device_meshes: dict[int, DeviceMesh] = {}
        self.axes, self.rank, self.device, self.wires, self.control = tuple(axes), rank, device, wires, control
        self.sizes = tuple(axis.size for axis in axes)
        self.coords = tuple(axis.index for axis in axes)
        self.world, self.tiers = math.prod(self.sizes), len(self.sizes)
        self.counter = Counter(axis.name for axis in axes)
        lane = StreamLane if device.type == "cuda" else Lane
        self.lanes = tuple(lane(axis.name) for axis in axes)
        self._world_lane = lane("world")
        self.ranks = tuple(range(self.world) if ranks is None else ranks)  # numbers here -> in the process group
        self.part = ranks is not None  # whether the process group has other ranks, which do not call what these do
        self.within: DeviceMesh | None = None  # whose ranks these are
        # Ranks at my place of meshes whose models are other parts: of tensor parallelism, and of all pipeline stages.
        self.tensor: Mesh | None = None
        self.stages: Mesh | None = None
        self.multiple = 1  # of which padded tensors have so many elements
        self._collectives = [
            collectives_of(axis, wires, self.counter, device) if axis.size > 1 else None for axis in self.axes
        ]
        self.slow_ring: Ring | None = None  # of the outermost axis, where ``wires.slow`` is set
        self.transitions = Transitions(self._route(), (*self.lanes, self._world_lane))

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backend(self) -> str:
        """Library of the data groups, for run records: ``gloo``, ``nccl`` or ``none`` for one process."""
        return str(dist.get_backend()) if self.world > 1 else "none"

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """The same ranks as a ``DeviceMesh`` with dimensions innermost first, for DTensors; none for one process alone.

        Nested slices are then ``Shard(0)`` on the leading dimensions. All ranks must ask for it together.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not dist.is_initialized():
            return None
        ranks = torch.tensor(self.ranks).view(self.sizes[::-1]).permute(*reversed(range(self.tiers)))
        names = tuple(axis.name for axis in self.axes)
        if self.part:
            # the constructor would build groups that all ranks must build together
            groups = [self._group(axis.ranks, axis.group) for axis in self.axes]
            return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=names)

    def device_mesh_of(self, level: int) -> DeviceMesh:
        """The ranks that share a tensor cut at a level, along one dimension in the order of ranks; all ask together."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if level not in self._device_meshes:
            kind, inside = self.device.type, self.inside(level)
            names = ("outside", "inside")
            if self.within is not None and inside == self.world:
                return self.within
            if self.part:
                group = self._group([self.ranks[rank] for rank in self.holders(level)])
                self._device_meshes[level] = DeviceMesh.from_group(group, kind, mesh_dim_names=names[1:])
                return self._device_meshes[level]
            both = init_device_mesh(kind, (self.world // inside, inside), mesh_dim_names=names)
            self._device_meshes[level] = both["inside"]
        return self._device_meshes[level]

    def _group(self, ranks: Sequence[int], there: ProcessGroup | None = None) -> ProcessGroup:
        """A group of these ranks of the process group, which they alone build, unless there is one."""
        if there is not None:
            return there
        with yielding():
            made: ProcessGroup = dist.new_group(list(ranks), self.patience, use_local_synchronization=True)
        return made

    @cached_property
    def group(self) -> Mesh:
        """The ranks of my group as a mesh of their own, whose outermost axis has one rank; all ranks ask together.

        Its tensors are cut as here. It shares lanes, rings and counters, since no two threads may use one ring.
        """
        inside = self.inside(self.tiers - 1)
        ranks = self.holders(self.tiers - 1)
        alone = replace(self.axes[-1], size=1, index=0, ranks=(self.ranks[self.rank],), group=None)
        made = copy.copy(self)
        made.__dict__.pop("device_mesh", None)
        made.axes, made._collectives = (*self.axes[:-1], alone), [*self._collectives[:-1], None]
        made.sizes, made.coords = (*self.sizes[:-1], 1), (*self.coords[:-1], 0)
        made.world, made.rank, made.ranks = inside, self.rank - ranks[0], tuple(self.ranks[rank] for rank in ranks)
        made.multiple, made._device_meshes, made.slow_ring, made.part = self.world, {}, None, True
        made.within = None
        made.control = None
        if inside > 1:
            with yielding():
                made.control = dist.new_group(
                    list(made.ranks), self.patience, backend="gloo", use_local_synchronization=True
                )
        made.transitions = Transitions(
            TwoLevel(made.sizes, made.coords, made._collectives), (*self.lanes, self._world_lane)
        )
        return made

    @property
    def beside(self) -> tuple[Mesh, ...]:
        """Meshes over which a gradient's norm is summed up, in this order."""
        return tuple(other for other in (self.tensor, self.stages) if other is not None)

    @property
    def between_groups(self) -> Collectives | None:
        """Collectives of the outermost axis; none where there is one group."""
        return self._collectives[-1]

    def layout(self, length: int) -> Layout:
        """How a flat tensor of so many elements is padded and cut here."""
        return Layout(sizes=self.sizes, length=length, multiple=self.multiple)

    def gather_scalars(self, values: Tensor) -> Tensor:
        """A few numbers (1-D) of every rank, as rows (world, length); blocking.

        From the main thread, in the same order on all ranks.
        """
        return self.gather_scalars_async(values)()

    def gather_scalars_async(self, values: Tensor) -> Callable[[], Tensor]:
        """``gather_scalars`` that only blocks when what it returns is called."""
        if self.world == 1:
            return values[None].clone
        # over a gloo group of its own: control messages must not mix with data, nor be counted as such
        mine = values.detach().to("cpu", copy=True)
        rows = torch.empty(self.world, mine.numel(), dtype=mine.dtype)
        under_way = dist.all_gather(list(rows.unbind(0)), mine, group=self.control, async_op=True)

        @functools.cache
        def wait() -> Tensor:
            under_way.wait()
            gathered = rows.to(values.device, copy=True)
            # gloo's own thread keeps the tensors for a while after it has reported the end
            for held in (mine, rows):
                held.untyped_storage().resize_(0)
            return gathered

        return wait

    def inside(self, level: int) -> int:
        """Ranks whose level-``level`` slices together make one full tensor (count)."""
        return math.prod(self.sizes[:level])

    def holders(self, level: int) -> tuple[int, ...]:
        """Those ranks, for the full tensor that my slice belongs to: same outer coordinates as I have."""
        first = self.rank // self.inside(level) * self.inside(level)
        return tuple(range(first, first + self.inside(level)))

    def replicas(self, level: int) -> tuple[int, ...]:
        """Ranks that hold the same level-``level`` slice as I do: same inner coordinates."""
        return tuple(range(self.rank % self.inside(level), self.world, self.inside(level)))

    def broadcast_(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite a contiguous tensor with that of rank ``src``; blocking, from the main thread, and not counted."""
        if self.world > 1:
            # a group of its own is known to gloo alone
            via = tensor if not self.part or tensor.device.type == "cpu" else tensor.cpu()
            dist.broadcast(via, self.ranks[src], group=self.control if via.device.type == "cpu" else None)
            if via is not tensor:
                tensor.copy_(via)
        return tensor

    def drain(self) -> None:
        """Wait until every lane is idle, and raise the first error of any."""
        for lane in (*self.lanes, self._world_lane):
            lane.drain()

    def close(self) -> None:
        """End the lanes; the process groups stay until ``destroy_process_group``."""
        for lane in (*self.lanes, self._world_lane):
            lane.close()
        for other in self.beside:
            other.close()

    def _route(self) -> TwoLevel:
        """How collectives over several axes run, and the ring of the world where they need one."""
        collectives = self._collectives
        if self.wires.gather == "flat" and self.world > 1:
            return Flat(self.sizes, self.coords, collectives, self._world_collectives())
        rings = [found.ring if isinstance(found, RingCollectives) else None for found in collectives]
        if self.wires.slow is not None:
            self.slow_ring, sizes = rings[-1], self.sizes
            got, why = f"LowBit on sizes {sizes}", "there is one group, so nothing crosses the outermost axis"
            require(sizes[-1] > 1, "slow", got, why, "leave slow out, or make two groups or more")
            why, do = "low-bit wires run on rings, which run on CPU", "leave slow out"
            require(self.slow_ring is not None, "slow", f"LowBit on {self.device.type}", why, do)
        if self.wires.gather == "overlapped" and any(rings):
            return Overlapped(self.sizes, self.coords, collectives, rings)
        return TwoLevel(self.sizes, self.coords, collectives)

    def _world_collectives(self) -> Collectives:
        """The ring in rank order; blocks by coordinates, and the limit of the link to the right neighbour."""
        axis = Axis(name="world", size=self.world, index=self.rank, ranks=self.ranks, group=self._flat)
        self.counter.sent["world"] = self.counter.messages["world"] = 0
        # A block belongs to a place in the nested layout, which is not the rank: see ``layout``.
        order = [block_index(coords_of(rank, self.sizes), self.sizes) for rank in range(self.world)]
        wires, limit = self.wires, self.wires.pace("world")
        if limit is None:
            # The outermost link that a message to the next rank crosses, which on a flat ring nobody shares.
            there = coords_of((self.rank + 1) % self.world, self.sizes)
            crossed = [axis for axis, place in zip(self.axes, there, strict=True) if axis.index != place]
            shared = wires.pace(crossed[-1].name)
            limit = None if shared is None else replace(shared, sharing=1)
        if limit is not None:
            wires = replace(wires, rate={"world": limit})
        return collectives_of(axis, wires, self.counter, self.device, order)


def make_mesh(
    *,
    groups: int | None = None,
    per_group: int | None = None,
    sizes: Sequence[int] | None = None,
    timeout: float | timedelta = 30.0,
    patience: float | timedelta = 600.0,
    wires: Wires | None = None,
    device: torch.device | str | None = None,
    within: DeviceMesh | None = None,
    stages: DeviceMesh | None = None,
    tensor: DeviceMesh | None = None,
) -> Mesh:
    """Arrange all ranks: rank i * per_group + j is place j of group i. Every rank calls it.

    One process needs no process group. Under ``torchrun`` the process group is started here unless it is already.

    Args:
        groups: Groups g that the slow network joins (count); none for what is left.
        per_group: Ranks m inside each (count); none for what is left, and with both none for the ranks of one machine.
        sizes: Ranks along each of up to three axes, innermost first, instead of the two above.
        timeout: How long to wait for ranks that have not come yet (s).
        patience: How long one message may take, and so how long a peer may lag behind (s).
        wires: How collectives run; none for rings, one axis after the other.
        device: Of the tensors that move; none for what the process group's backend serves.
        within: The ranks of one dimension of a ``DeviceMesh``, such as ``device_mesh["dp"]``: the mesh is of these
            alone, numbered from 0 in their order. None: all ranks.
        stages: The ranks along the pipeline, such as ``device_mesh["pp"]``, where each trains a part of the model: the
            norm of a gradient, and so clipping, is over all of them. None: a rank's model is whole.
        tensor: The ranks of ``parallelize_module``, such as ``device_mesh["tp"]``; with engine "fsdp2" alone.

    Returns:
        The mesh; ``mesh.transitions`` moves tensors over it.

    Raises:
        UserError: If the numbers do not multiply to the world size.
        RunError: If a rank does not come; it is named.
    """
    wait, message = _seconds(timeout), timedelta(seconds=_seconds(patience))
    if not dist.is_initialized() and launched() > 1:
        join(wait)
    me = dist.get_rank() if dist.is_initialized() else 0
    ranks = range(dist.get_world_size() if dist.is_initialized() else 1) if within is None else ranks_of(within, me)
    world, rank = len(ranks), ranks.index(me)
    check_beside({"tensor": tensor, "stages": stages}, ranks, me)
    shape = mesh_sizes(world, groups=groups, per_group=per_group, sizes=sizes, local=per_machine(ranks))
    if world > 1:
        key = f"sparing/mesh/{'all' if within is None else list(ranks)}/{next(_turns[tuple(ranks)])}"
        shape = meet(shape, rank, ranks, wait, key, derived=not (groups or per_group or sizes))
    wires = wires or Wires()
    # None: all ranks together
    some, alone = (None, False) if within is None else (list(ranks), True)
    with yielding():
        axes = [_axis(k, shape, rank, message, ranks) for k in range(len(shape))]
        control = flat = None
        if world > 1:
            control = dist.new_group(some, message, backend="gloo", use_local_synchronization=alone)
            if wires.gather == "flat":
                flat = dist.new_group(some, message, use_local_synchronization=alone)
    made = Mesh(axes, rank, _device(device), wires, control, flat, message, some)
    made.within = within
    along = partial(make_mesh, timeout=wait, patience=message, device=made.device)
    made.tensor = None if tensor is None else along(within=tensor, sizes=(tensor.size(),))
    made.stages = None if stages is None else along(within=stages, sizes=(stages.size(),))
    return made


def mesh_sizes(
    world: int,
    *,
    groups: int | None = None,
    per_group: int | None = None,
    sizes: Sequence[int] | None = None,
    local: int | None = None,
) -> tuple[int, ...]:
    """Ranks along each axis, innermost first: (m, g), or ``sizes`` once checked.

    Without ``groups`` and ``per_group``, a group is the ranks of one machine.
    """
    if sizes is not None:
        both = groups is not None or per_group is not None
        require(not both, "sizes", list(sizes), "groups and per_group say the same", "pass one or the other")
        legal = 1 <= len(sizes) <= max(NAMES) and min(sizes) >= 1 and math.prod(sizes) == world
        why = f"there are {world} ranks, on one to three axes"
        require(legal, "sizes", list(sizes), why, f"pass positive numbers whose product is {world}")
        return tuple(sizes)
    if groups is None and per_group is None:
        per_group = local or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    per_group = per_group if per_group is not None else world // max(groups or 1, 1)
    groups = groups if groups is not None else world // max(per_group, 1)
    legal = groups >= 1 and per_group >= 1 and groups * per_group == world
    got = f"{groups} groups of {per_group} ranks"
    require(legal, "mesh", got, f"that is not the world size {world}", f"pass groups * per_group = {world}")
    return per_group, groups


def _axis(k: int, sizes: tuple[int, ...], rank: int, patience: timedelta, numbers: Sequence[int] | None = None) -> Axis:
    """Axis k with its group: only its own ranks build it, and every rank builds its lines in the same order.

    ``numbers``: of the mesh's ranks in the process group.
    """
    stride = math.prod(sizes[:k])
    index = rank // stride % sizes[k]
    line = (rank + (place - index) * stride for place in range(sizes[k]))
    ranks = tuple(line if numbers is None else (numbers[place] for place in line))
    # Local synchronization: only the ranks of a line build its group, so lines must be built in the same order on all.
    group = None if sizes[k] == 1 else dist.new_group(ranks, timeout=patience, use_local_synchronization=True)
    return Axis(name=NAMES[len(sizes)][k], size=sizes[k], index=index, ranks=ranks, group=group)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _seconds(time: float | timedelta) -> float:
    return time.total_seconds() if isinstance(time, timedelta) else float(time)


# Numbers the meetings: meshes are made in the same order on all their ranks, and a key of the store serves once.
_turns: collections.defaultdict[tuple[int, ...], itertools.count[int]] = collections.defaultdict(itertools.count)
