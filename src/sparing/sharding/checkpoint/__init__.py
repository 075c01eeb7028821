"""Checkpoints of a sharded run: every rank writes its slices, any plan on any number of ranks reads them.

A checkpoint is a folder of safetensors shards, written through ``torch.distributed.checkpoint``, and ``manifest.json``.
All ranks must see one file system. It is written under a temporary name and renamed: whatever is killed when, the
folder of that name is the old checkpoint or the new one, whole. Nothing in it is pickled.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sparing.blocks.names import plain_name
from sparing.errors import RunError, UserError, require
from sparing.sharding.checkpoint import manifest as manifests
from sparing.sharding.checkpoint import rows
from sparing.sharding.checkpoint.manifest import Manifest, Part, Place, dtype_of, name_of, scalar_of
from sparing.sharding.checkpoint.own import Scalars, check_groups, own_buffers, own_scalars, slices_of
from sparing.sharding.checkpoint.ranges import Piece, Shards
from sparing.sharding.checkpoint.residuals import check_residuals, gradient_scale
from sparing.sharding.checkpoint.resume import check_fits, restore_
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.engine import Engine
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.network.consistency import check_apart
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.on_ranks import on_all_ranks, on_first_rank

__all__ = ["load_", "save", "weights_in"]


def save(
    engine: Engine | FsdpEngine, folder: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint; every rank calls it, between two steps, and returns when it is whole on the disk.

    Weights are saved once, at the optimizer's precision where they train; optimizer state, parameter groups' options,
    buffers (rank 0's; those made after ``shard_`` are each rank's own, and not saved) and step counts are with them.
    All ranks must see the ``folder``; a checkpoint of that name is replaced, anything else refused. ``extra`` (rank
    0's) holds numbers, strings, lists and dicts, which ``load_`` returns.
    """
    mesh, target = engine.mesh, Path(folder).absolute()
    _settle(engine, "save")
    _check_stage(mesh, target)
    # refuses what a manifest cannot say, before anything is written
    if isinstance(engine, FsdpEngine):
        rows.parts(engine)
    else:
        for bucket in engine.buckets:
            if bucket in engine.masters:
                engine.masters.unused(bucket)
        check_groups(engine)
    draft = target.with_name(f".{target.name}.draft")

    def prepare() -> None:
        _check_plain(extra or {}, "extra")
        with _explain_os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _recover(target)
            _check_replaceable(target)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()

    on_first_rank(mesh, prepare)
    buffers = _live_buffers(engine)
    whole = {f"buffers/{name}": flat for name, flat in _flat(buffers).items()} if mesh.rank == 0 else {}
    own = {} if isinstance(engine, FsdpEngine) else own_buffers(engine, _flat(buffers))
    _write_tensors(mesh, draft, {**_tensors(engine), **whole, **own})
    shard = draft / f"shard-{mesh.rank + 1:05d}-model-00001-of-00001{manifests.SUFFIX}"
    hashed = on_all_ranks(mesh, lambda: manifests.digest(shard) if shard.is_file() else "0" * 64)
    found = mesh.gather_scalars(torch.frombuffer(bytearray.fromhex(hashed), dtype=torch.uint8))
    files = {f"shard-{rank + 1:05d}{shard.name[11:]}": bytes(row.tolist()).hex() for rank, row in enumerate(found)}
    manifest = _manifest_of(engine, extra or {}, {name: known for name, known in files.items() if int(known, 16)})
    on_first_rank(mesh, lambda: _finish(target, draft, manifest))


def _settle(engine: Engine | FsdpEngine, what: str) -> None:
    why = "gradients of a step under way belong to no checkpoint"
    require(not engine.micro_step, what, f"after {engine.micro_step} micro-steps", why, "call step() first")
    require(not engine.closed, what, "a closed engine", "its slices are gone", "call it before close()")
    if isinstance(engine, FsdpEngine):
        why, do = "its files know rows alone", "save engine.state_dict() by torch.distributed.checkpoint"
        require(engine.mesh.tensor is None, what, "an engine with tensor parallelism", why, do)
        rows.settle(engine)
        return
    engine.flow.release_()
    engine.flush()


def _check_stage(mesh: Mesh, target: Path) -> None:
    """Refuse one folder for two stages of a pipeline."""
    why, do = "a checkpoint is of one stage's ranks", 'name one for each stage, such as f"{folder}/stage{stage}"'
    check_apart(mesh.stages, [str(target)], "checkpoint", why, do)


def _finish(target: Path, draft: Path, manifest: Manifest) -> None:
    """The last file, then the name."""
    apart = sorted({path.name for path in draft.iterdir()} ^ manifest.files.keys())
    why, do = "rank 0 does not see what the others wrote", "save to a file system that all machines share"
    require(not apart, "checkpoint", f"{', '.join(apart[:3])} amiss in {draft}", why, do)
    with _explain_os_errors(target):
        # The manifest comes last, then one rename: a kill at any time leaves the old checkpoint or the new one, whole.
        manifests.write(draft, manifest)
        _flush(draft)
        old = _old_name(target)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        # a rename is on the disk once its folder is
        _flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def _old_name(target: Path) -> Path:
    """Where the checkpoint of the same name waits while the new one takes its place."""
    return target.with_name(f".{target.name}.old")


def _recover(target: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    old = _old_name(target)
    if old.exists() and not target.exists():
        old.rename(target)


def _check_replaceable(target: Path) -> None:
    """Refuse a name that something other than a checkpoint or an empty folder has: what is replaced is deleted."""
    held = sorted(target.iterdir()) if target.is_dir() else []
    # the name of the manifest alone tells little: programs of all kinds have one
    ours = [path for path in held if path.name == manifests.NAME or path.match(f"shard-*-model-*{manifests.SUFFIX}")]
    others = [path.name for path in held if path not in ours or not (target / manifests.NAME).is_file()]
    fits = not others and (target.is_dir() or not target.exists())
    got = f"{target}, which holds {', '.join(others[:3])}" if others else f"the file {target}"
    why, do = "only a checkpoint or an empty folder is replaced", "name a folder that is not there yet"
    require(fits, "checkpoint", got, why, do)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explain_os_errors(target: Path) -> Iterator[None]:
    """Turn errors of the file system into one line."""
    try:
        yield
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: BaseException) -> UserError:
    why = f"it cannot be written ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return UserError(
        "checkpoint", got=target, why=why, do="free space or name a writable folder; what was there is whole"
    )


def _check_plain(value: object, path: str) -> None:
    """Refuse what JSON would drop or change."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            require(isinstance(key, str), path, repr(key), "keys are strings in JSON", "make it a string")
            _check_plain(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{path}[{index}]")
    else:
        plain = value is None or isinstance(value, bool | int | float | str)
        why, do = "it is saved as JSON, never pickled", "turn it into numbers, strings, lists and dicts"
        require(plain, path, f"a {type(value).__name__}", why, do)


def _tensors(engine: Engine | FsdpEngine) -> dict[str, Tensor]:
    """My slices, as DTensors where there are several ranks, or rows."""
    if isinstance(engine, FsdpEngine):
        return rows.tensors(engine)
    mesh, found = engine.mesh, {}
    for bucket in engine.buckets:
        level = engine.levels(bucket)[2]
        slices = {"params": (bucket.store, bucket.level)}
        if bucket in engine.masters:
            # what the user has written since the last step is told from what was published, which is not saved
            engine.masters.take_edits_(bucket, level)
            if not engine.lags(bucket):
                slices = {}
            state = engine.masters.state(bucket)
            slices["master"] = (engine.masters.values(bucket), level)
            slices |= {f"state/{name}": (value, level) for name, value in state.items() if value.ndim}
            if engine.outer is not None:
                slices = slices_of(engine, engine.outer, bucket)
        if bucket.name in engine.residuals:
            slices["residual"] = (engine.residuals[bucket.name].value, mesh.tiers)
        for name, (part, at) in slices.items() if bucket.layout.length else ():
            # A nested slice is sharded along the leading dimensions of the mesh.
            placements: list[Placement] = [Shard(0)] * at + [Replicate()] * (mesh.tiers - at)
            if mesh.world > 1:
                assert mesh.device_mesh is not None
                part = DTensor.from_local(part.detach(), mesh.device_mesh, placements, run_check=False)
            found[f"{bucket.name}/{name}"] = part
    return found


def _flat(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses to save what shares storage, as one buffer under two names does
    return {name: value.detach().reshape(-1).clone() for name, value in buffers.items() if value.numel()}


def _live_buffers(engine: Engine | FsdpEngine) -> dict[str, Tensor]:
    """By canonical name, without those that the model made after ``shard_``, which are each rank's own."""
    named, canonical = _named(engine), _canonical(engine)
    held = [(plain_name(engine.model, name), b) for name, b in engine.model.named_buffers(remove_duplicate=False)]
    buffers = {id(value) for _, value in held}
    for name, value in named.items():
        why, do = "it is neither parameter nor buffer, and nothing would bring it back", "make it a buffer"
        require(id(value) in canonical or id(value) in buffers, "checkpoint", f"{name} in the state dict", why, do)
    # one buffer under two names is shared under one of them
    shared = {id(value) for name, value in held if name in engine.shared_buffers}
    return {name: value for name, value in named.items() if id(value) in shared}


def _named(engine: Engine | FsdpEngine) -> dict[str, Any]:
    """The state dict of the model, whatever wraps it or its blocks, under the names that its author gave."""
    model = engine.model
    return {plain_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}


def _canonical(engine: Engine | FsdpEngine) -> dict[int, str]:
    """Names of parameters, by identity."""
    if isinstance(engine, FsdpEngine):
        return {id(one.shard): one.name for one in rows.held(engine)}
    return {id(p): slot.name for b in engine.buckets for p, slot in zip(b.params, b.slots, strict=True)}


def _write_tensors(mesh: Mesh, draft: Path, tensors: dict[str, Tensor]) -> None:
    """One file per rank, forced to the disk; a slice that several ranks hold is written by one of them."""
    writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
    try:
        # one process is what was asked for
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_saver.save(tensors, storage_writer=writer, process_group=mesh.control, no_dist=mesh.world == 1)
    # The same on all ranks, and a BaseException, so nothing above would catch it.
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise _unwritable(draft, error) from None
        raise RunError(f"checkpoint: rank {rank} could not write into {draft}: {error}") from None
    except OSError as error:
        raise _unwritable(draft, error) from error


def _manifest_of(engine: Engine | FsdpEngine, extra: Mapping[str, Any], files: Mapping[str, str]) -> Manifest:
    canonical, named = _canonical(engine), _named(engine)
    return Manifest(
        world=engine.mesh.world,
        sizes=engine.mesh.sizes,
        steps=engine.steps,
        skipped=engine.skipped,
        optimizer=type(engine.optimizer).__name__,
        groups=tuple(_options(group) for group in engine.optimizer.param_groups),
        parts=rows.parts(engine) if isinstance(engine, FsdpEngine) else _parts(engine),
        names={name: canonical[id(value)] for name, value in named.items() if id(value) in canonical},
        buffers={name: (name_of(x.dtype), tuple(x.shape)) for name, x in _live_buffers(engine).items()},
        extra=extra,
        files=files,
        inner=None if isinstance(engine, FsdpEngine) or engine.outer is None else engine.outer.inner,
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a parameter group; a learning rate that is a tensor is its number."""
    plain = {
        key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    inner = {key: value if isinstance(value, list | tuple) else [value] for key, value in plain.items()}
    simple = {
        key: all(item is None or isinstance(item, bool | int | float | str) for item in inner[key]) for key in inner
    }
    return {key: value for key, value in plain.items() if simple[key]}


def _parts(engine: Engine) -> tuple[Part, ...]:
    own = own_scalars(engine)
    return tuple(_part(engine, bucket, own.get(bucket.name, ())) for bucket in engine.buckets)


def _part(engine: Engine, bucket: Bucket, own: Scalars) -> Part:
    trains = bucket in engine.masters
    state = engine.masters.state(bucket) if trains else {}
    places = (Place(name=s.name, shape=tuple(s.shape), offset=s.offset, group=s.group) for s in bucket.slots)
    return Part(
        name=bucket.name,
        plan=str(engine.plans[bucket.name].name),
        dtype=name_of(bucket.dtype),
        saved=name_of(engine.masters.values(bucket).dtype if trains else bucket.dtype),
        trains=trains,
        places=tuple(places),
        state={key: name_of(value.dtype) for key, value in state.items() if value.ndim},
        unused=engine.masters.unused(bucket) if trains else (),
        lags=trains and engine.lags(bucket),
        residual=bucket.name in engine.residuals,
        loss_scale=gradient_scale(engine),
        scalars={k: scalar_of(v, plain=k in engine.masters.plain) for k, v in state.items() if not v.ndim},
        own_scalars=own,
    )


def load_(engine: Engine | FsdpEngine, folder: str | os.PathLike[str], *, residuals: bool = True) -> dict[str, Any]:
    """Resume a saved run and return its ``extra``; every rank calls it. Engine, plan and number of ranks may differ.

    With local steps another number of groups goes on from right after an outer step: a mean is over those that are
    there, and each takes the inner state of a saved one.

    Every file is compared with its hash before anything changes. What trained then trains afterwards, and what had
    been frozen since ``shard_`` stays frozen. Every rank reads only its own slices. ``residuals=False`` forgets what
    low-bit wires owed of gradients, which engines without error feedback cannot take.
    """
    mesh, path = engine.mesh, Path(folder).absolute()
    _settle(engine, "load_")
    _check_stage(mesh, path)
    on_first_rank(mesh, lambda: _recover(path))
    manifest = on_all_ranks(mesh, lambda: _checked(path, mesh.rank, mesh.world))
    on_all_ranks(mesh, lambda: check_fits(engine, manifest, _live_buffers(engine)))
    if residuals:
        check_residuals(engine, manifest)
    else:
        manifest = replace(manifest, parts=tuple(replace(part, residual=False) for part in manifest.parts))
    restore_(engine, manifest, path, _live_buffers(engine))
    return dict(manifest.extra)


def _checked(path: Path, rank: int, world: int) -> Manifest:
    manifest = manifests.read(path)
    manifests.check_files(path, manifest, rank, world)
    return manifest


def weights_in(folder: str | os.PathLike[str], *, masters: bool = False) -> dict[str, Tensor]:
    """The weights of a checkpoint as an ordinary CPU state dict, in one process and without the model.

    ``masters`` takes the optimizer's 32-bit values where there are some; tied weights are one tensor.
    """
    path = Path(folder).absolute()
    _recover(path)
    manifest = _checked(path, 0, 1)
    flat = {
        name: torch.zeros(math.prod(shape), dtype=dtype_of(dtype)) for name, (dtype, shape) in manifest.buffers.items()
    }
    pieces = [
        Piece(source=f"buffers/{name}", begin=0, target=value, at=0, length=value.numel())
        for name, value in flat.items()
    ]
    shaped = {name: flat[name].view(shape) for name, (_, shape) in manifest.buffers.items()}
    for part, place in manifest.places.values():
        flat[place.name] = torch.zeros(math.prod(place.shape), dtype=dtype_of(part.saved if masters else part.dtype))
        source, target = f"{part.name}/{'master' if part.trains else 'params'}", flat[place.name]
        pieces.append(Piece(source=source, begin=place.offset, target=target, at=0, length=target.numel()))
        shaped |= {
            name: flat[place.name].view(place.shape)
            for name, canonical in manifest.names.items()
            if canonical == place.name
        }
    Shards(path).read_(piece for piece in pieces if piece.length)
    return shaped
