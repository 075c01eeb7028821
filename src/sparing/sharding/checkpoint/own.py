"""Local steps in a checkpoint: what groups have in common is saved once, what each has for itself by group.

What groups have for themselves is laid out as residuals are: the parts of a group's ranks, block b·g + i of the rank at
place b inside group i, g groups. Right after an outer step that is the optimizer's state alone, and another number of
groups may take up the run: group i of the new ones has the state of group i modulo g. Between outer steps weights and
buffers are with it, and the run goes on with as many groups as it had.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.sharding.checkpoint.manifest import Manifest, Part, scalar_of
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.engine import Engine
from sparing.sharding.engine.outer_step import part_of, weights_of
from sparing.sharding.local.outer import Outer

Scalars = Sequence[Mapping[str, tuple[float, str]]]  # by group: name -> value and dtype


def check_groups(engine: Engine) -> None:
    """Refuse to save where groups have state of other parameters; every rank calls."""
    if engine.outer is None:
        return
    trained = [bucket for bucket in engine.buckets if bucket in engine.masters]
    known = [(b.name, sorted(engine.masters.state(b)), engine.masters.unused(b)) for b in trained]
    rows = engine.mesh.gather_scalars(torch.tensor([zlib.crc32(repr(known).encode())]))
    why, do = "some had a gradient in some groups alone", "save weights alone, by engine.full_state_dict()"
    require(bool((rows == rows[0]).all()), "checkpoint", "states of other parameters in other groups", why, do)


def slices_of(engine: Engine, outer: Outer, bucket: Bucket) -> dict[str, tuple[Tensor, int]]:
    """What is saved of a bucket that trains, each with its level; the last level for what is a group's own."""
    tiers, mine = engine.mesh.tiers, weights_of(engine, bucket)
    momentum = outer.momenta.get(bucket.name)
    found: dict[str, Any] = {
        "master": (outer.anchors[bucket.name] if outer.inner else mine, tiers - 1),
        "momentum": (torch.zeros_like(mine) if momentum is None else momentum, tiers - 1),
    }
    own = {f"state/{name}": value for name, value in engine.masters.state(bucket).items() if value.ndim}
    found |= {f"own/{name}": (part_of(engine, bucket, value), tiers) for name, value in own.items()}
    return found | ({"own/master": (mine, tiers)} if outer.inner else {})


def own_buffers(engine: Engine, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers of my group, of its first rank, where they may not be those of the first group."""
    group = engine.mesh.coords[-1]
    if engine.outer is None or not engine.outer.inner or engine.peers.rank or not group:
        return {}
    return {buffer_of(group, name): flat for name, flat in buffers.items()}


def buffer_of(group: int, name: str) -> str:
    """Under which a group's buffer is saved."""
    return f"own/{group}/buffers/{name}" if group else f"buffers/{name}"


def own_scalars(engine: Engine) -> dict[str, Scalars]:
    """By bucket, the scalars of each group's state; every rank calls."""
    if engine.outer is None:
        return {}
    trained = [bucket for bucket in engine.buckets if bucket in engine.masters]
    states = {b.name: {k: v for k, v in engine.masters.state(b).items() if not v.ndim} for b in trained}
    plain = engine.masters.plain
    kinds = {(name, k): scalar_of(v, plain=k in plain)[1] for name, state in states.items() for k, v in state.items()}
    flat = [float(value) for state in states.values() for value in state.values()]
    rows = engine.mesh.gather_scalars(torch.tensor(flat, dtype=torch.float64))
    each = [iter(row) for row in rows[:: engine.peers.world].tolist()]
    return {
        name: [{key: (next(values), kinds[name, key]) for key in state} for values in each]
        for name, state in states.items()
    }


def check_local(engine: Engine | None, manifest: Manifest) -> None:
    """Refuse to go on with local steps as if there were none, or in mid-interval with other groups.

    None is an engine that knows of no local steps.
    """
    if manifest.inner is None:
        return
    got, why = "groups that train alone", "each has optimizer state of its own"
    do = "pass local=LocalSteps(…) to shard_ (of engine sparing), or take weights_in(folder) alone"
    if engine is None or engine.outer is None:
        raise UserError("checkpoint", got=got, why=why, do=do)
    groups, here = manifest.sizes[-1], engine.mesh.sizes[-1]
    got = f"inner step {manifest.inner} of {groups} groups"
    why = f"each has weights of its own there, and here the number of groups is {here}"
    do = f"save right after an outer step, or start with {groups} groups"
    require(not manifest.inner or groups == here, "checkpoint", got, why, do)


def group_here(engine: Engine, manifest: Manifest) -> int:
    """Whose state my group takes up."""
    return engine.mesh.coords[-1] % manifest.sizes[-1]


def scalars_of(part: Part, group: int) -> Mapping[str, tuple[float, str]]:
    """The scalars of a group's state; of all ranks where there are no local steps."""
    return part.own_scalars[group] if part.own_scalars else part.scalars
