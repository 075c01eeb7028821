"""SCE: select the elements in which models differ most, weigh models by their squares, erase minority signs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from sparing.valley.merging.method import Rule, Slices, TaskVectorMethod, check_settings, zip_slices
from sparing.valley.merging.ties import before, disjoint_mean, elect, largest, mask


@dataclass(frozen=True, slots=True)
class Sce(TaskVectorMethod):
    """Select, calculate, erase: a mean of task vectors whose weights follow from their own magnitudes.

    Of each tensor, the share ``keep`` of elements with the largest variance over the models stays (of those with any);
    each model's weight is the mean square of what stays of its task vector; elements without the elected sign are left
    out, and the weights of the others are divided by their sum.

    Source: Wan et al. 2024, "FuseChat" (arXiv:2408.07990), where τ is ``keep``.
    """

    keep: float = 1.0
    """Share of elements kept, those of largest variance over the models, in (0, 1]."""
    _: KW_ONLY
    scale: float = 1.0
    """Factor of the merged task vector (dimensionless)."""
    like_mergekit: bool = False
    """Whether mergekit's limits hold: models weigh the same where their mean squares add up to less than 1e-6, and an
    even vote elects plus."""

    def __post_init__(self) -> None:
        check_settings(scale=self.scale, keep=self.keep)

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        limit = self._limit(deltas)
        squares = torch.zeros(len(deltas), dtype=torch.float64)
        for parts in zip_slices(deltas):
            wide = [part.double() for part in _selected(parts, limit)]
            squares += torch.stack([torch.dot(part, part) for part in wide]).cpu()
        mean = squares / max(1, deltas[0].count)
        # where nothing changed, all models weigh the same
        even = float(mean.sum()) <= (1e-6 if self.like_mergekit else 0.0)
        weights = [1 / len(deltas)] * len(deltas) if even else (mean / mean.sum()).tolist()

        def merged(parts: Sequence[Tensor], base: Tensor) -> Tensor:
            kept = _selected(parts, limit)
            sign = elect(kept, [1.0] * len(kept), "plus" if self.like_mergekit else "none")
            return self.scale * disjoint_mean(kept, sign, weights, least=1e-6 if self.like_mergekit else 0.0)

        return merged

    def _limit(self, deltas: Sequence[Slices]) -> float:
        """The smallest variance that is kept."""
        if self.keep >= 1:
            return 0.0

        differ = 0

        def variances() -> Iterator[Tensor]:
            nonlocal differ
            differ = 0
            for parts in zip_slices(deltas):
                found = _variance(parts)
                differ += int(torch.count_nonzero(found))
                yield found

        # The rank is asked for after the first reading
        return largest(variances, lambda count: int(differ * self.keep))


def _variance(parts: Sequence[Tensor]) -> Tensor:
    """As ``torch.var`` has it to the bit, in a fiftieth of the time: it takes a reduction over a few models badly."""
    first = parts[0].double()
    apart = [part.double() - first for part in parts[1:]]  # of equal numbers exactly zero
    mean = sum(apart, torch.zeros_like(first)) / len(parts)
    squares = sum(((part - mean).square_() for part in apart), mean.square())
    return (squares / len(parts)).to(parts[0].dtype)


def _selected(parts: Sequence[Tensor], limit: float) -> list[Tensor]:
    if limit == 0:
        return list(parts)
    stay = mask(_variance(parts), before(limit, parts[0].dtype))
    return [part * stay for part in parts]
