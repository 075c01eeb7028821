"""A merge that elects the signs of changes, as TIES does, and protects the signs of the weights they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.method import Rule, Slices, TaskVectorMethod, check_settings, weights_for
from sparing.valley.merging.ties import Ties


@dataclass(frozen=True, slots=True)
class SignAware(TaskVectorMethod):
    """TIES, with a veto: the merged change may not flip the sign of a base weight unless enough models flipped it.

    Where θ₀ + δ has the other sign than θ₀, the models whose own weight has it vote for the flip, each with the
    magnitude of its change |τ_t|. Without more than ``majority`` of Σ|τ_t| the change is dropped there and the base
    weight stays, as TIES drops what loses an election. (Stopping at zero would leave exact zeros, which read as
    pruned weights.) Base weights that are zero have no sign to guard.

    With ``scale`` ≤ 1 the disjoint mean never exceeds its largest member, so a flip needs one model at least that
    wants it; what the veto stops are flips that only a minority wants.

    Source: ours. The election is that of Yadav et al. 2023; that signs of weights, not only of changes, decide whether
    an average works is the finding of Li et al. 2024 (arXiv:2405.12489, §5).
    """

    keep: float = 0.2
    """Share of elements kept in each task vector, in (0, 1]."""
    _: KW_ONLY
    scale: float = 1.0
    """Factor of the merged task vector (dimensionless)."""
    majority: float = 0.5
    """Share of Σ|τ_t| that the votes for a flip must exceed, in [0, 1); 0 lets any model flip a sign."""
    weights: tuple[float, ...] | None = None
    """Weights of the models in all votes, ≥ 0; None for equal weights."""

    def __post_init__(self) -> None:
        why = "it is a share of the votes that must be exceeded"
        require(0 <= self.majority < 1, "majority", self.majority, why, "pass 0 <= majority < 1, such as 0.5")
        check_settings(weights=self.weights, scale=self.scale, keep=self.keep)

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        ties = Ties(self.keep, scale=self.scale, weights=self.weights)._rule(name, deltas)
        weights = weights_for(self.weights, len(deltas))

        def merged(parts: Sequence[Tensor], base: Tensor) -> Tensor:
            wanted = ties(parts, base)
            origin = base.to(wanted)
            flips = (origin + wanted) * origin < 0
            return wanted.masked_fill(flips & ~majority_flips(origin, parts, weights, self.majority), 0.0)

        return merged


def majority_flips(base: Tensor, deltas: Sequence[Tensor], weights: Sequence[float], majority: float = 0.5) -> Tensor:
    """Return where the models that flip the sign of the base weight hold more than ``majority`` of Σ w_t |τ_t|."""
    votes, total = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        size = weight * delta.abs()
        total += size
        votes += torch.where((base + delta) * base < 0, size, 0.0)
    return votes > majority * total
