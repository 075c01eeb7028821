"""The norm of a gradient that is split over ranks, with the same bits on all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparing.sharding.layout import coords_of
from sparing.sharding.network.mesh import Mesh

ROW = 4096  # squares are added in single precision within rows of this length (elements)


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


def whole_norm(mesh: Mesh, squares: Sequence[float]) -> Callable[[], float]:
    """A function that waits for the norm of all slices; NaN if any is not finite.

    Every rank adds the same numbers in the same order, so the decision to clip or to skip is the same everywhere.
    ``squares`` are this rank's, by level.
    """
    arriving = mesh.gather_scalars_async(torch.tensor(squares, dtype=torch.float64))

    @functools.cache
    def norm() -> float:
        rows = arriving()
        if not rows.isfinite().all():
            return math.nan
        # fsum over rows in the order of ranks: the same bits everywhere, which an all-reduce does not promise
        shares = (rows[owners(mesh.sizes, level), level].sum().item() for level in range(len(squares)))
        return math.sqrt(math.fsum(shares))

    return norm
