"""A merge that elects the signs of changes, as TIES does, and protects the signs of the weights they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.linear import add_to_base, check_scale, check_weights, task_vectors, weights_for
from sparing.valley.method import Method
from sparing.valley.slices import Slices, zip_slices
from sparing.valley.ties import Ties, require_keep


@dataclass(frozen=True, slots=True)
class SignAware(Method):
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
    """Of the models in all votes, ≥ 0; None for equal weights."""

    def __post_init__(self) -> None:
        require_keep(self.keep)
        why = "it is a share of the votes that must be exceeded"
        require(0 <= self.majority < 1, "majority", self.majority, why, "pass 0 <= majority < 1, such as 0.5")
        check_scale(self.scale)
        check_weights(self.weights)

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        found = task_vectors(name, models, base)
        assert base is not None
        yield from add_to_base(base, self._guarded(name, found, base), models[0])

    def _guarded(self, name: str, deltas: Sequence[Slices], base: Slices) -> Iterator[Tensor]:
        """Merge task vectors by TIES, without the flips that too few models want."""
        rule = Ties(self.keep, scale=self.scale, weights=self.weights).rule(name, deltas)
        weights = weights_for(self.weights, len(deltas))
        for parts, start in zip(zip_slices(deltas), base(), strict=True):
            wanted = rule(parts)
            origin = start.to(wanted)
            flips = (origin + wanted) * origin < 0
            refused = flips & ~majority_flips(origin, parts, weights, self.majority)
            yield wanted.masked_fill(refused, 0.0)


def majority_flips(base: Tensor, deltas: Sequence[Tensor], weights: Sequence[float], majority: float = 0.5) -> Tensor:
    """Return where the models that flip the sign of the base weight hold more than ``majority`` of Σ w_t |τ_t|."""
    votes, total = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        size = weight * delta.abs()
        total += size
        votes += torch.where((base + delta) * base < 0, size, 0.0)
    return votes > majority * total
