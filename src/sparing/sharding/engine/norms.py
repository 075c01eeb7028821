"""Norms of gradients that are split over ranks, with the same bits on all of them, and clipping by them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import require
from sparing.sharding.layout import coords_of
from sparing.sharding.network.mesh import Mesh

ROW = 4096  # squares are added in single precision within rows of this length (elements)
ORDERS = (1.0, 2.0, math.inf)


@dataclass(frozen=True, slots=True)
class Clip:
    """The largest norm that gradients may have, as in torch's ``clip_grad_norm_``; longer ones are scaled down to it.

    Example:
        >>> Clip(0.1, norm_type=float("inf"), each=True).factor(0.4)
        0.249999375001...

    Raises:
        UserError: If ``max_norm`` is not positive and finite, or the norm is of another type.

    Source: Pascanu et al. 2013, Algorithm 1; https://arxiv.org/abs/1211.5063
    """

    max_norm: float
    """Positive."""
    norm_type: float = 2.0
    """1, 2 or infinity: the sum of magnitudes, the Euclidean length, or the largest magnitude."""
    each: bool = False
    """Whether every parameter is clipped by its own norm; else all by that of the whole gradient."""

    def __post_init__(self) -> None:
        fits = self.max_norm > 0 and math.isfinite(self.max_norm)
        require(fits, "clip", self.max_norm, "it is a positive size", "pass a positive number, or None")
        why = "these are the norms that are put together from slices"
        require(self.norm_type in ORDERS, "norm_type", self.norm_type, why, "pass 1, 2 or float('inf')")

    def factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by; 1e-6 as in torch's ``clip_grad_norm_``."""
        return 1.0 if norm <= self.max_norm else self.max_norm / (norm + 1e-6)


@dataclass(frozen=True, slots=True)
class Norms:
    """Of the whole gradient and of its parts; NaN where anything in them is not finite."""

    whole: float
    parts: tuple[float, ...]

    def clip_(self, parts: Iterable[Tensor], clip: Clip) -> None:
        """Scale this rank's slices of the parts down to the largest norm."""
        for part, norm in zip(parts, self.parts, strict=True):
            factor = clip.factor(norm if clip.each else self.whole)
            if factor != 1.0:
                part.mul_(factor)


def owners(sizes: tuple[int, ...], level: int) -> list[int]:
    """Ranks, ascending, whose slices at a level are the whole tensor once: the first of every set of replicas.

    Example:
        >>> owners((2, 2), 1)
        [0, 1]
    """
    return [rank for rank in range(math.prod(sizes)) if not any(coords_of(rank, sizes)[level:])]


def square(x: Tensor) -> float:
    """Squared norm of a flat tensor, to about 1e-7: double precision over rows summed in single."""
    if x.dtype is torch.float32 and x.numel() > ROW:
        whole = x.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1)
        # else squares may have overflowed float32, and all elements are converted
        if rows.isfinite().all():
            return square(rows.double()) + square(x[whole:].double())
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2)


def power(x: Tensor, order: float) -> float:
    """What norms of slices are put together from: sum of magnitudes or of squares, or the largest magnitude."""
    if not x.numel():
        return 0.0
    if order == 2:
        return square(x.flatten())
    return float(torch.linalg.vector_norm(x, order, dtype=torch.float64).item())


def together(powers: Sequence[float], order: float) -> float:
    """The power of a tensor from those of its pieces."""
    if not all(map(math.isfinite, powers)):
        return math.nan
    # fsum: the same bits in any order of the same numbers
    return max(powers, default=0.0) if order == math.inf else math.fsum(powers)


def joined(powers: Sequence[float], order: float) -> float:
    """The norm of a tensor from the powers of its pieces."""
    total = together(powers, order)
    return math.sqrt(total) if order == 2 else total


def whole_norms(mesh: Mesh, slices: Sequence[tuple[int, float]], order: float) -> Callable[[], Norms]:
    """A function that waits for the norms of tensors that are split over ranks.

    ``slices``: level and power of this rank's slice of each tensor, in the same order on all ranks. Every rank puts
    the same numbers together, so the decision to clip or to skip is the same everywhere, which an all-reduce does not
    promise. Under tensor parallelism each tensor is split over its ranks, too, and over the stages of a pipeline the
    whole gradient.
    """
    if not slices and not mesh.beside:
        return lambda: Norms(0.0, ())
    mine = torch.tensor([power for _, power in slices], dtype=torch.float64)
    arriving = mesh.gather_scalars_async(mine) if slices else lambda: mine[None]

    @functools.cache
    def norms() -> Norms:
        rows = arriving()
        # one bad replica, even if no sum reads it, spoils its tensor for all
        bad = (~rows.isfinite()).any(0).tolist()
        first = {level: owners(mesh.sizes, level) for level in {level for level, _ in slices}}
        held = [
            [math.nan] if spoiled else [column[rank] for rank in first[level]]
            for (level, _), column, spoiled in zip(slices, rows.T.tolist(), bad, strict=True)
        ]
        if mesh.tensor is not None:
            held = _across(mesh.tensor, held, order)
        every = [power for powers in held for power in powers]
        if mesh.stages is not None:
            (every,) = _across(mesh.stages, [every], order)
        return Norms(joined(every, order), tuple(joined(powers, order) for powers in held))

    return norms


def _across(mesh: Mesh, held: Sequence[Sequence[float]], order: float) -> list[list[float]]:
    """Of tensors whose pieces have these powers here, the power on every rank of another mesh."""
    mine = torch.tensor([together(powers, order) for powers in held], dtype=torch.float64)
    return mesh.gather_scalars(mine).T.tolist() if held else []
