"""Sharded weights as ordinary ones, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.sharding.engine.buckets import Bucket

# A slice of a bucket's values and its level, or None where the store has them.
Values = Callable[[Bucket], tuple[Tensor, int] | None]


def spread(bucket: Bucket, part: Tensor, frm: int, to: int) -> Tensor:
    """My slice at level ``frm`` brought to level ``to``, as a new tensor; where it is coarser, all ranks call."""
    if to >= frm:
        offset, length = bucket.layout.within(to, frm, bucket.mesh.coords)
        return part.narrow(0, offset, length).clone()
    made = part.new_empty(bucket.layout.size(to))
    offset, length = bucket.layout.within(frm, to, bucket.mesh.coords)
    made.narrow(0, offset, length).copy_(part)
    return bucket.mesh.transitions.gather_(made, frm, to).wait()


def whole(bucket: Bucket, values: Values | None = None) -> Tensor:
    """The flat values of a bucket from all ranks, padding included; ``values`` replaces the store. Every rank calls."""
    bucket.wait_pending_()
    part, level = (values(bucket) if values else None) or (bucket.store, bucket.level)
    return spread(bucket, part, level, 0)


def full_state_dict(model: nn.Module, buckets: Sequence[Bucket], values: Values | None = None) -> dict[str, Tensor]:
    """Copies of the weights under the names of ``model.state_dict()``; call on every rank."""
    held: dict[int, Tensor] = {}
    for bucket in buckets:
        views = bucket.unflatten(whole(bucket, values))
        held |= {id(p): view for p, (_, view) in zip(bucket.params, views, strict=True)}
    named = model.state_dict(keep_vars=True)
    return {name: held.get(id(value), value).detach().clone() for name, value in named.items()}


def load_full_state_dict_(
    model: nn.Module, buckets: Sequence[Bucket], state: Mapping[str, Any], values: Values
) -> None:
    """Put an ordinary state dict into stores, masters (``values``) and buffers; nothing travels."""
    named = model.state_dict(keep_vars=True)
    check_state(named, state)
    given = {id(value): state[name] for name, value in named.items()}
    for bucket in buckets:
        bucket.wait_pending_()
        for part, level in filter(None, ((bucket.store, bucket.level), values(bucket))):
            _fill_(bucket, part, level, [given[id(p)] for p in bucket.params])
    parameters = {id(p) for bucket in buckets for p in bucket.params}
    with torch.no_grad():
        for name, value in named.items():
            if id(value) not in parameters:
                value.copy_(state[name])


def check_state(named: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Refuse a state dict whose names or shapes are not those of the model."""
    strange = sorted(named.keys() ^ state.keys())
    if strange:
        why, do = "the state dict is of another model", "pass that of this model"
        raise UserError("state dict", got=f"{len(strange)} names that differ, such as {strange[0]}", why=why, do=do)
    for name, value in named.items():
        got = tuple(state[name].shape)
        require(got == tuple(value.shape), name, got, f"its shape is {tuple(value.shape)}", "pass that of this model")


def _fill_(bucket: Bucket, mine: Tensor, level: int, tensors: Sequence[Tensor]) -> None:
    """Copy the part of each tensor that lies in my slice of a level."""
    for index, start, at, length in bucket.overlaps(level):
        mine.narrow(0, at, length).copy_(tensors[index].detach().reshape(-1)[start : start + length])
