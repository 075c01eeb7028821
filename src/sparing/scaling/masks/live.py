"""Changes of a sparse layer's mask on its live places alone: of the dense size there is at most one score at a time.

Places are ascending positions in the flattened weight as it is stored, int64, shape (live,). Each function is the twin
of one on dense masks and gives the same numbers: ``exchange`` and ``prune`` in ``dynamic``, ``prefill`` there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparing.scaling.sparse.pattern import Pattern, move_values

_PIECE = 2**14  # scores that are sorted at once (count)


def exchange_live(values: Tensor, places: Tensor, score: Tensor, *, fraction: float) -> Tensor:
    """Drop a fraction of the live weights, the smallest, and grow as many of the highest scores; counts round down."""
    count = int(fraction * len(places))
    stays = _without_smallest(values, places, count)
    return torch.cat([stays, highest(score.flatten(), stays, count)]).sort().values


def prune_live(values: Tensor, places: Tensor, density: float, numel: int) -> Tensor:
    """Keep the largest live weights, ``density`` of all ``numel`` entries (rounded, at least one)."""
    return _without_smallest(values, places, max(0, len(places) - max(1, round(density * numel))))


def highest(score: Tensor, taken: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` highest scores that are not taken; ties go to the lower position."""
    best, at = score.new_empty(0), taken.new_empty(0)
    for first in range(0, len(score), _PIECE):
        piece = score[first : first + _PIECE]
        ends = torch.tensor([first, first + len(piece)], device=taken.device)
        low, high = torch.searchsorted(taken, ends).tolist()
        free = torch.ones(len(piece), dtype=torch.bool, device=piece.device)
        free[taken[low:high] - first] = False
        places = free.nonzero().flatten()
        # Those of earlier pieces come first, so that a stable sort leaves ties to them.
        best, at = torch.cat([best, piece[places]]), torch.cat([at, places + first])
        order = torch.sort(-best, stable=True).indices[:count]
        best, at = best[order], at[order]
    return at


def _without_smallest(values: Tensor, places: Tensor, count: int) -> Tensor:
    kept = torch.ones(len(places), dtype=torch.bool, device=places.device)
    kept[torch.sort(values.abs(), stable=True).indices[:count]] = False
    return places[kept]


def prefill_live(second: Tensor, old: Pattern, new: Pattern, floor: Tensor | None) -> Tensor:
    """Return a second moment, shape (live,), in a new pattern, grown weights with the mean of their row's kept ones.

    ``floor``, at the places of the new pattern, is the least they get.
    """
    kept = move_values(torch.ones(old.live, dtype=torch.bool, device=second.device), old, new)
    moved, rows = move_values(second, old, new), new.rows
    counts = torch.bincount(rows[kept], minlength=new.shape[0])
    sums = second.new_zeros(new.shape[0]).index_add_(0, rows[kept], moved[kept])
    layer = sums.sum() / counts.sum().clamp(min=1)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), layer)
    filled = means[rows] if floor is None else torch.maximum(means[rows], floor.to(second.dtype))
    return torch.where(kept, moved, filled)


def finite(gradient: Tensor) -> Tensor:
    """A dense gradient in which what overflowed, as under a gradient scaler, says nothing of a weight."""
    return torch.where(gradient.isfinite(), gradient, 0.0)


def factor_between(seen: Tensor, used: Tensor | None) -> float:
    """By what the optimizer's gradient differs from the one seen at the same places; 1 where nothing tells."""
    if used is None:
        return 1.0
    one, other = float(seen.norm()), float(used.norm())
    return other / one if one > 0 and math.isfinite(other) else 1.0


def floor_live(
    at_old: Tensor, at_new: Tensor, used: Tensor | None, state: Mapping[str, Any], betas: tuple[float, float] | None
) -> Tensor | None:
    """Return squares of the dense gradient at the new places, in the units of Adam's second moment; None without those.

    ``at_old`` and ``at_new`` are the gradient before masking at the old and the new places, ``used`` the optimizer's.
    """
    if betas is None or "exp_avg_sq" not in state:
        return None
    squares: Tensor = (at_new * factor_between(at_old, used)).square() * (1.0 - betas[1] ** float(state["step"]))
    return squares
