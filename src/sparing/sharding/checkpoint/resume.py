"""A saved run put into a live engine: whether it fits, and every rank's slices out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparing.blocks.names import plain_name
from sparing.errors import UserError, require
from sparing.sharding.checkpoint import rows
from sparing.sharding.checkpoint.manifest import Manifest, dtype_of, scalar_from
from sparing.sharding.checkpoint.own import buffer_of, check_local, group_here, scalars_of
from sparing.sharding.checkpoint.ranges import Piece, Shards
from sparing.sharding.checkpoint.residuals import Places, pieces_of, read_residuals_
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.engine import Engine
from sparing.sharding.engine.masters import slice_of, tensor_of
from sparing.sharding.engine.outer_step import weights_of
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.network.on_ranks import on_all_ranks


def check_fits(engine: Engine | FsdpEngine, manifest: Manifest, buffers: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that would not continue the same run."""
    places = manifest.places
    ours: dict[str, tuple[int, ...]]
    if isinstance(engine, FsdpEngine):
        ours = {one.name: tuple(one.shard.shape) for one in rows.held(engine)}
    else:
        ours = {slot.name: tuple(slot.shape) for b in engine.buckets for slot in b.slots}
    ours |= {name: tuple(value.shape) for name, value in buffers.items()}
    theirs = {name: place.shape for name, (_, place) in places.items()}
    late = _late(engine) - ours.keys()
    saved = {name: tuple(shape) for name, (_, shape) in manifest.buffers.items() if name not in late}
    _check_model(ours, theirs | saved)
    kind = type(engine.optimizer).__name__
    why, do = f"its state is of {manifest.optimizer}", f"pass {manifest.optimizer}, or take weights_in(folder) alone"
    require(kind == manifest.optimizer, "optimizer", kind, why, do)
    count = len(engine.optimizer.param_groups)
    why, do = f"the checkpoint has {len(manifest.groups)}", "pass the groups of the saved run"
    require(count == len(manifest.groups), "groups", f"{count} parameter groups", why, do)
    check_local(None if isinstance(engine, FsdpEngine) else engine, manifest)
    if isinstance(engine, FsdpEngine):
        rows.check_fits(engine, manifest)
        return
    for bucket in engine.buckets:
        _check_bucket(engine, bucket, places)


def _late(engine: Engine | FsdpEngine) -> set[str]:
    """Buffers that the model makes after ``shard_``, or may, which older checkpoints hold too."""
    found: set[str] = set()
    for at, part in engine.model.named_modules(remove_duplicate=False):
        names = part._buffers.keys() - part._non_persistent_buffers_set
        found |= {plain_name(engine.model, f"{at}.{name}" if at else name) for name in names}
    return found - set(engine.shared_buffers)


def _check_model(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> None:
    differing, do = sorted(ours.keys() ^ theirs.keys()), "build the model that was saved"
    if differing:
        got = f"another model: {len(differing)} name(s) differ, such as {differing[0]}"
        where = "the model" if differing[0] in ours else "the checkpoint"
        raise UserError("checkpoint", got=got, why=f"only {where} has it", do=do)
    for name, shape in ours.items():
        got = f"another model: {name} of shape {theirs[name]}"
        require(shape == theirs[name], "checkpoint", got, f"here its shape is {shape}", do)


def _check_bucket(engine: Engine, bucket: Bucket, places: Places) -> None:
    found = {slot.name: places[slot.name] for slot in bucket.slots}
    kinds = {part.trains: name for name, (part, _) in found.items()}
    do = "freeze what was frozen before shard_, or take weights_in(folder) alone"
    got, why = f"{kinds.get(True)} trained, {kinds.get(False)} rested", f"here {bucket.name} trains as one"
    require(len(kinds) == 1, "checkpoint", got, why, do)
    got, why = f"{kinds.get(True)} trained", f"it was frozen before shard_, in {bucket.name}"
    require(True not in kinds or bucket.may_train, "checkpoint", got, why, do)
    for slot in bucket.slots:
        part, place = found[slot.name]
        same = not part.trains or place.group == slot.group
        why, do = f"here it is in group {slot.group}", "pass the groups of the saved run"
        require(same, "groups", f"{slot.name} in group {place.group}", why, do)
        format_ = engine.settings.master_dtype(bucket.dtype) if part.trains else bucket.dtype
        exact = torch.promote_types(dtype_of(part.saved), format_) == format_
        why = f"here {bucket.name} is {format_}, and values would be rounded"
        require(exact, "checkpoint", f"{part.saved} values", why, "shard with the saved dtype and masters")
    parts = [part for part, _ in found.values()]
    facts = {(*part.state.items(), *map(str, part.scalars.items()), str(part.own_scalars)) for part in parts}
    why, do = "they are one bucket here", "shard with the same body and frozen parameters as the saved run"
    require(len(facts) == 1, "checkpoint", f"optimizer states of several ages in {bucket.name}", why, do)


def restore_(engine: Engine | FsdpEngine, manifest: Manifest, folder: Path, buffers: Mapping[str, Tensor]) -> None:
    """Load a checkpoint that ``check_fits`` accepted, between two steps; every rank calls."""
    if isinstance(engine, FsdpEngine):
        rows.restore_(engine, manifest, folder, buffers)
    else:
        _restore_slices_(engine, manifest, folder, buffers)
    engine.steps, engine.skipped = manifest.steps, manifest.skipped
    _set_options_(engine, manifest)


def _restore_slices_(engine: Engine, manifest: Manifest, folder: Path, buffers: Mapping[str, Tensor]) -> None:
    places = manifest.places
    # Buckets train as they did when saved, whatever was frozen or thawed here since ``shard_``.
    for bucket in engine.buckets:
        trains = places[bucket.slots[0].name][0].trains
        if bucket in engine.masters:  # drops the optimizer's state
            engine.detach_(bucket)
        for parameter in bucket.params:
            parameter.requires_grad_(trains)
        if trains:
            engine.attach_(bucket)

    def read_() -> None:
        saved = _Saved(manifest, Shards(folder), places, group_here(engine, manifest))
        _read_(engine, saved, buffers)
        read_residuals_(engine, manifest, saved.shards)

    on_all_ranks(engine.mesh, read_)
    for bucket in engine.buckets:
        bucket.raise_versions_()
        if _lagged(engine, bucket, places):
            engine.masters.note_published_(bucket, slice_of(bucket, engine.levels(bucket)[2]))
        elif bucket in engine.masters:
            engine.publish_(bucket, exactly=True)
    engine.flush()
    if engine.outer is not None:
        engine.outer.inner = manifest.inner or 0


def _set_options_(engine: Engine | FsdpEngine, manifest: Manifest) -> None:
    """Give parameter groups the saved options."""
    for group, saved in zip(engine.optimizer.param_groups, manifest.groups, strict=True):
        for key, value in saved.items():
            held = group.get(key)
            if isinstance(held, Tensor):
                held.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(held, tuple) else value


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint as my rank reads it."""

    manifest: Manifest
    shards: Shards
    places: Places
    group: int  # whose own weights and state I take up, where groups train alone

    def read_(self, bucket: Bucket, level: int, target: Tensor, what: str) -> None:
        """Fill my slice of a level from the saved tensors; ``own/…`` are laid out by group."""
        self.shards.read_(self._pieces(bucket, level, target, what))

    def _pieces(self, bucket: Bucket, level: int, target: Tensor, what: str) -> Iterator[Piece]:
        for index, start, at, length in bucket.overlaps(level):
            part, place = self.places[bucket.slots[index].name]
            begin, mine = place.offset + start, target.narrow(0, at, length)
            if what.startswith("own/"):
                yield from pieces_of(part, what, self.manifest.sizes, self.group, begin, mine)
            else:
                yield Piece(source=f"{part.name}/{what}", begin=begin, target=mine, at=0, length=length)


def _read_(engine: Engine, saved: _Saved, buffers: Mapping[str, Tensor]) -> None:
    """Read my slices bucket by bucket, so that one bucket's state at most is held twice."""
    inner, places = saved.manifest.inner, saved.places
    for bucket in engine.buckets:
        if bucket in engine.masters:
            level = engine.levels(bucket)[2]
            saved.read_(bucket, level, engine.masters.values(bucket), "own/master" if inner else "master")
            engine.masters.load_state_(bucket, _state(engine, bucket, saved))
            unused = {slot.name for slot in bucket.slots if slot.name in places[slot.name][0].unused}
            engine.masters.drop_state_(bucket, level, unused)
            _read_common_(engine, bucket, saved)
        if bucket not in engine.masters or _lagged(engine, bucket, places):
            saved.read_(bucket, bucket.level, bucket.store, "params")
    for name, value in buffers.items():
        if value.numel():
            flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
            source = buffer_of(saved.group, name) if inner else f"buffers/{name}"
            saved.shards.read_([Piece(source=source, begin=0, target=flat, at=0, length=flat.numel())])
            value.detach().copy_(flat.view(value.shape))


def _read_common_(engine: Engine, bucket: Bucket, saved: _Saved) -> None:
    """What groups that train alone share: the outer momentum, and in mid-interval where they started."""
    if engine.outer is None:
        return
    engine.outer.forget_(bucket.name)
    if saved.manifest.inner is not None:
        level, like = engine.mesh.tiers - 1, weights_of(engine, bucket)
        momentum = engine.outer.momenta[bucket.name] = torch.zeros_like(like)
        saved.read_(bucket, level, momentum, "momentum")
        if saved.manifest.inner:
            anchor = engine.outer.anchors[bucket.name] = torch.zeros_like(like)
            saved.read_(bucket, level, anchor, "master")


def _lagged(engine: Engine, bucket: Bucket, places: Places) -> bool:
    """Whether parameters lag behind masters both here and in the checkpoint."""
    saved = all(places[slot.name][0].lags for slot in bucket.slots)
    return saved and bucket in engine.masters and engine.lags(bucket)


def _state(engine: Engine, bucket: Bucket, saved: _Saved) -> dict[str, Tensor]:
    part, level, values = saved.places[bucket.slots[0].name][0], engine.levels(bucket)[2], engine.masters.values(bucket)
    found: dict[str, Tensor] = {}
    for key, name in part.state.items():
        # Moments follow a master that has become wider.
        dtype = values.dtype if name == part.saved else dtype_of(name)
        found[key] = torch.zeros(bucket.layout.size(level), dtype=dtype, device=values.device)
        saved.read_(bucket, level, found[key], f"state/{key}" if saved.manifest.inner is None else f"own/state/{key}")
    held = {key: scalar_from(*given) for key, given in scalars_of(part, saved.group).items()}
    engine.masters.plain |= {key for key, value in held.items() if not isinstance(value, Tensor)}
    return found | {key: tensor_of(value) for key, value in held.items()}
