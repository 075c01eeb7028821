"""Engines on ``fully_shard`` in checkpoints: a part for each parameter, of which every rank has some rows.

Files and manifest are those of our own engine, where a part is a bucket: either reads what the other wrote. Rows of a
parameter are one stretch of its flat tensor, so no rank sends anything to save or to load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.sharding.checkpoint.manifest import Manifest, Part, Place, dtype_of, scalar_from, scalar_of
from sparing.sharding.checkpoint.ranges import Piece, Shards
from sparing.sharding.engine.masters import of_group
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.fsdp.parameters import local_of
from sparing.sharding.fsdp.rows import rows_of
from sparing.sharding.fsdp.units import Unit
from sparing.sharding.network.on_ranks import on_all_ranks


class Stretch(Tensor):
    """Some elements of a flat tensor, as torch's checkpoints ask for them: DTensors know even pieces only."""

    first: int
    length: int  # of the flat tensor

    @classmethod
    def of(cls, mine: Tensor, first: int, length: int) -> Stretch:
        """View my elements."""
        made = mine.detach().reshape(-1).as_subclass(cls)
        made.first, made.length = first, length
        return made

    def __create_write_items__(self, name: str, held: object) -> list[WriteItem]:
        del held
        chunk = ChunkStorageMetadata(offsets=torch.Size([self.first]), sizes=torch.Size([self.numel()]))
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size([self.length])
        )
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)] if self.numel() else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.first]), sizes=torch.Size([self.numel()]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        del index
        return self.as_subclass(Tensor)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter, and what the optimizer has of it."""

    name: str
    shard: Any  # what ``fully_shard`` keeps, a DTensor
    unit: Unit | None = None  # None for what ``shard_`` found frozen
    index: int = 0  # in the unit

    @property
    def trains(self) -> bool:
        """Whether it trains now."""
        return self.unit is not None and self.index in self.unit.on

    @property
    def value(self) -> Any:
        """What the optimizer changes."""
        assert self.unit is not None
        return self.unit.values[self.index]

    @property
    def saved(self) -> Any:
        """Where the exact numbers are."""
        return self.value if self.trains else self.shard

    def first(self, *, optimizer: bool) -> int:
        """My first element of the flat parameter, of the optimizer's rows or of what is kept."""
        mesh, (rows, *rest) = self.shard.device_mesh, self.shard.shape
        at, mine = rows_of(rows, mesh.size(), mesh.get_local_rank())
        if optimizer and self.unit is not None and self.unit.sums.packs:
            finer = self.unit.sums.finer
            at += rows_of(mine, finer.ranks, finer.place)[0]
        return int(at * prod(rest))

    def piece(self, source: str, begin: int, target: Tensor, *, optimizer: bool) -> Piece:
        """My elements, of a saved tensor in which the parameter begins there."""
        start = begin + self.first(optimizer=optimizer)
        return Piece(source=source, begin=start, target=target, at=0, length=target.numel())


def held(engine: FsdpEngine) -> list[Held]:
    """Every parameter once, in the order of the model."""
    trained = {name: (unit, at) for unit in engine.units for at, name in enumerate(unit.names)}
    return [Held(name, shard, *trained.get(name, ())) for name, shard in named_parameters(engine.model).items()]


def settle(engine: FsdpEngine) -> None:
    """Leave nothing under way, and parameters as they are kept."""
    engine.materialize_()
    assert engine.optimizer is not None
    engine.reshard_()
    for unit in engine.units:
        unit.take_edits_()
    engine.mesh.drain()


def _state_of(engine: FsdpEngine, one: Held) -> Mapping[str, Any]:
    """The optimizer's state by name: my rows, or numbers."""
    state = engine.optimizer.state.get(one.value, {}) if one.unit is not None else {}
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor | int | float)}
    why, do = "it rests with state of the optimizer, which no checkpoint holds", "call engine.freeze for its block"
    require(one.trains or not tensors, one.name, "requires_grad_(False)", why, do)
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in tensors.items()}


def _states(engine: FsdpEngine, parameters: list[Held]) -> dict[str, tuple[Mapping[str, Any], bool]]:
    """By parameter: its state, or zeros like that of another in its unit where it never had a gradient."""
    found = {one.name: _state_of(engine, one) for one in parameters}
    likes = {id(one.unit): found[one.name] for one in reversed(parameters) if found[one.name]}
    made: dict[str, tuple[Mapping[str, Any], bool]] = {}
    for one in parameters:
        like = likes.get(id(one.unit), {})
        made[one.name] = (found[one.name], False)
        if one.trains and like and not found[one.name]:
            mine = local_of(one.value)
            zeros = {k: torch.zeros_like(mine, dtype=v.dtype) if _long(v) else v for k, v in like.items()}
            made[one.name] = (zeros, True)
    return made


def tensors(engine: FsdpEngine) -> dict[str, Tensor]:
    """My rows by name."""
    parameters = held(engine)
    states, made = _states(engine, parameters), dict[str, Tensor]()
    for one in parameters:
        length, first = one.shard.numel(), one.first(optimizer=one.trains)
        kept = {"master" if one.trains else "params": local_of(one.saved)}
        kept |= {f"state/{key}": value for key, value in states[one.name][0].items() if _long(value)}
        made |= {f"{one.name}/{what}": Stretch.of(mine, first, length) for what, mine in kept.items() if length}
    return made


def parts(engine: FsdpEngine) -> tuple[Part, ...]:
    """What a manifest says of each parameter."""
    parameters = held(engine)
    states = _states(engine, parameters)
    return tuple(
        Part(
            name=one.name,
            plan=str(engine.plan.name),
            dtype=_name(one.shard.dtype),
            saved=_name(one.saved.dtype),
            trains=one.trains,
            places=(Place(name=one.name, shape=tuple(one.shard.shape), offset=0, group=engine.group_of(one.name)),),
            state={key: _name(value.dtype) for key, value in states[one.name][0].items() if _long(value)},
            unused=(one.name,) if states[one.name][1] else (),
            loss_scale=engine.settings.loss_scale or 1.0,
            scalars={k: scalar_of(v) for k, v in states[one.name][0].items() if not _long(v)},
        )
        for one in parameters
    )


def _long(value: Tensor | float) -> bool:
    """Whether it is more than one number."""
    return isinstance(value, Tensor) and value.ndim > 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_fits(engine: FsdpEngine, manifest: Manifest) -> None:
    """Refuse values that this engine cannot hold, or would not train."""
    places = manifest.places
    for one in held(engine):
        part, place = places[one.name]
        do = "freeze what was frozen before shard_, or take weights_in(folder) alone"
        free = one.unit is not None or not part.trains
        require(free, "checkpoint", f"{one.name} trained", "it was frozen before shard_", do)
        group = engine.group_of(one.name)
        why, do = f"here it is in group {group}", "pass the groups of the saved run"
        same = not part.trains or place.group == group
        require(same, "groups", f"{one.name} in group {place.group}", why, do)
        format_ = one.value.dtype if part.trains else one.shard.dtype
        exact = torch.promote_types(dtype_of(part.saved), format_) == format_
        why = f"here {one.name} is {format_}, and values would be rounded"
        require(exact, "checkpoint", f"{part.saved} values", why, "shard with the saved dtype and masters")


def restore_(engine: FsdpEngine, manifest: Manifest, folder: Path, buffers: Mapping[str, Tensor]) -> None:
    """Load a checkpoint that ``check_fits`` accepted, between two steps; every rank calls."""
    places = manifest.places
    for unit in engine.units:
        unit.train_([at for at, name in enumerate(unit.names) if places[name][0].trains])
    # a block that trains again is gathered once
    engine.reshard_()
    engine.optimizer.state.clear()
    on_all_ranks(engine.mesh, lambda: _read_(engine, manifest, Shards(folder), buffers))
    engine.publish_()


@torch.no_grad()
def _read_(engine: FsdpEngine, manifest: Manifest, shards: Shards, buffers: Mapping[str, Tensor]) -> None:
    for one in held(engine):
        part, place = manifest.places[one.name]
        target = local_of(one.saved)
        flat = torch.empty(target.numel(), dtype=target.dtype)
        what = "master" if part.trains else "params"
        shards.read_(_some(one.piece(f"{part.name}/{what}", place.offset, flat, optimizer=part.trains)))
        target.copy_(flat.view_as(target))
        if not part.trains:
            if one.unit is not None:
                # or what the optimizer has would be taken for the exact value later
                one.unit.forget_exact_(one.index)
            continue
        if one.name not in part.unused and (part.state or part.scalars):
            engine.optimizer.state[one.value] = _state(engine, one, part, place, shards)
    for name, value in buffers.items():
        if value.numel():
            flat = torch.empty(value.numel(), dtype=value.dtype)
            shards.read_([Piece(source=f"buffers/{name}", begin=0, target=flat, at=0, length=flat.numel())])
            value.detach().copy_(flat.view(value.shape))


def _some(piece: Piece) -> Iterator[Piece]:
    """Nothing where this rank has no rows."""
    if piece.length:
        yield piece


def _state(engine: FsdpEngine, one: Held, part: Part, place: Place, shards: Shards) -> dict[str, Any]:
    value, state = one.value, dict[str, Any]()
    for key, name in part.state.items():
        # moments follow a master that has become wider
        state[key] = torch.zeros_like(value, dtype=value.dtype if name == part.saved else dtype_of(name))
        target = local_of(state[key])
        flat = torch.empty(target.numel(), dtype=target.dtype)
        shards.read_(_some(one.piece(f"{part.name}/state/{key}", place.offset, flat, optimizer=True)))
        target.copy_(flat.view_as(target))
    group = engine.optimizer.param_groups[engine.group_of(one.name)]
    # torch wants counts of steps on the device for these
    there = value.device if group.get("fused") or group.get("capturable") else None
    scalars = {key: scalar_from(*given, there) for key, given in of_group(part.scalars, place.group).items()}
    return {**state, **scalars}
