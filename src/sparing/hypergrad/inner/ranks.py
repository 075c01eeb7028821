"""Processes that share an inner loss: the mean of their gradients with its derivatives, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.inner.repeatability import first_difference


class _Mean(torch.autograd.Function):
    """The mean over ranks; cotangents are averaged too, so that each rank has the same gradient to pull back.

    A rank's own part of a derivative is then only right in the mean over ranks, which is taken once, at the end.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return mean(parts, group)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        averaged: tuple[Tensor, ...] = _Mean.apply(ctx.group, *cotangents)  # type: ignore[no-untyped-call]
        return (None, *averaged)


def differentiable_mean(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The mean over ranks of each tensor, with a graph."""
    averaged: tuple[Tensor, ...] = _Mean.apply(group, *parts)  # type: ignore[no-untyped-call]
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


def refuse_disagreement(told: Mapping[str, Sequence[Tensor] | int], group: dist.ProcessGroup) -> None:
    """Refuse a run that begins differently on another rank, or has ended differently: on all ranks alike."""
    own = {name: [value] if isinstance(value, int) else _sums(value) for name, value in told.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    eps = max(torch.finfo(p.dtype).eps for value in told.values() if not isinstance(value, int) for p in value)
    for name, first in everyone[0].items():
        for rank, other in enumerate(everyone):
            if len(other[name]) != len(first) or first_difference(first, other[name], eps):
                raise UserError(
                    name, got=f"another value on rank {rank} of the group than on rank 0",
                    why="the mean of gradients of different runs is the gradient of none",
                    do="give all ranks the same; only their batches, or what the losses read of them, may differ",
                )  # fmt: skip


def _sums(parts: Sequence[Tensor]) -> list[float]:
    """Two numbers for each tensor, which tell it from others."""
    wide = [part.detach().double().reshape(-1) for part in parts]
    return [float(x) for part in wide for x in (part.sum(), torch.linspace(1, 2, len(part)).to(part) @ part)]
