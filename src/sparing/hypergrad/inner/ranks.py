"""Processes that share an inner loss: the mean of their gradients with its derivatives, and whether they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.errors import RunError, UserError
from sparing.hypergrad.inner.repeatability import first_difference


class _Mean(torch.autograd.Function):
    """The mean over ranks; cotangents are averaged too, so that each rank has the same gradient to pull back.

    A rank's own part of a derivative is then only right in the mean over ranks, which is taken once, at the end.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.others = group, len(tensors) - count
        return mean(tensors[:count], group)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        averaged = differentiable_mean(cotangents, ctx.group)
        return (None, None, *averaged, *[None] * ctx.others)


def differentiable_mean(
    parts: Sequence[Tensor], group: dist.ProcessGroup, inputs: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """The mean over ranks of each tensor, with a graph that leads to all ``inputs``, whatever the parts depend on.

    Autograd skips a node that leads to nothing it was asked for. Here it would skip a rank whose own loss ignores θ or
    ψ in some step, and the ranks would average cotangents of different steps, or wait for each other forever.
    """
    averaged: tuple[Tensor, ...] = _Mean.apply(group, len(parts), *parts, *inputs)  # type: ignore[no-untyped-call]
    return averaged


def mean(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The mean over ranks of each tensor, by one sum for each dtype: all ranks then sum in the same order."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in parts):
        at = [place for place, part in enumerate(parts) if part.dtype == dtype]
        flat = torch.cat([parts[place].detach().reshape(-1) for place in at])
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        pieces = torch.split(flat, [parts[place].numel() for place in at])
        found |= {place: piece.view(parts[place].shape) for place, piece in zip(at, pieces, strict=True)}
    return tuple(found[place] for place in range(len(parts)))


def largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of the ranks' numbers, on all ranks."""
    held = torch.tensor(number, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
    return int(held)


def begin_together(
    told: Mapping[str, Sequence[Tensor] | int | str], error: Exception | None, group: dist.ProcessGroup
) -> None:
    """End the run on all ranks if one of them cannot take part, or if they do not begin alike, to the bit."""
    own = {name: value if isinstance(value, int | str) else _digest(value) for name, value in told.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    refused = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(everyone, (own, refused), group=group)
    if error is not None:
        raise error
    for rank, (_, refusal) in enumerate(everyone):
        if refusal is not None:
            raise RunError(f"rank {rank} of the group cannot take its part: {refusal}")
    for name, first in everyone[0][0].items():
        for rank, (other, _) in enumerate(everyone):
            _require_same(name, other.get(name) == first, rank)


def require_same_end(theta: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Refuse weights that ended elsewhere on another rank, by more than rounding, leaf by leaf."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [_sums(leaf) for leaf in theta], group=group)
    for rank, other in enumerate(everyone):
        pairs = zip(everyone[0], other, theta, strict=True)
        same = all(first_difference(a, b, torch.finfo(leaf.dtype).eps) is None for a, b, leaf in pairs)
        _require_same("the last weights", same, rank)


def _require_same(name: str, same: bool, rank: int) -> None:
    if not same:
        raise UserError(
            name, got=f"another value on rank {rank} of the group than on rank 0",
            why="the mean of gradients of different runs is the gradient of none",
            do="give all ranks the same; only their batches, or what the losses read of them, may differ",
        )  # fmt: skip


def _digest(parts: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _sums(leaf: Tensor) -> list[float]:
    """Two sums that tell a leaf from others, and the size of what is summed."""
    wide = leaf.detach().double().reshape(-1)
    turns = torch.linspace(1, 2, len(wide), dtype=torch.float64, device=wide.device)
    return [float(wide.sum()), float(turns @ wide), float(wide.abs().sum())]
