"""Merging by arithmetic: the weighted mean of models, and the base plus the sum of what each of them learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce

import torch
from torch import Tensor

from sparing.valley.merging.method import (
    Method,
    Rule,
    Slices,
    TaskVectorMethod,
    check_finite,
    check_settings,
    upcast,
    weighted_sum,
    weights_for,
    zip_slices,
)


@dataclass(frozen=True, slots=True)
class Linear(Method):
    """The weighted mean of the models: Σ w_t θ_t / Σ w_t.

    Example:
        >>> Linear((3.0, 1.0)).tensor("w", [torch.zeros(1), torch.ones(1)])
        tensor([0.2500])
    """

    weights: tuple[float, ...] | None = None
    """Weights of the models in order, ≥ 0 (dimensionless); None for equal weights."""
    _: KW_ONLY
    normalize: bool = True
    """Whether the weighted sum is divided by the sum of the weights; else weights may be negative."""

    def __post_init__(self) -> None:
        if self.normalize:
            check_settings(weights=self.weights)
        else:
            check_finite(self.weights)

    @property
    def needs_base(self) -> bool:
        """False: a mean needs no ancestor."""
        return False

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        weights = weights_for(self.weights, len(models))
        for parts in zip_slices(models):
            merged = (
                _mean(parts, weights) if self.normalize else weighted_sum([upcast(part) for part in parts], weights)
            )
            yield merged.to(parts[0].dtype)


def _mean(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """A running mean, under which equal numbers average to themselves; a sum of w · θ would round them."""
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight > 0]
    wide = reduce(torch.promote_types, [part.dtype for part, _ in counted], torch.float32)
    merged, total = counted[0][0].to(wide), counted[0][1]
    for part, weight in counted[1:]:
        total += weight
        merged = torch.lerp(merged, upcast(part, merged), weight / total)
    return merged


@dataclass(frozen=True, slots=True)
class TaskArithmetic(TaskVectorMethod):
    """The base plus the sum of task vectors: θ₀ + λ Σ w_t (θ_t − θ₀).

    Source: Ilharco et al. 2023 (arXiv:2212.04089); λ = 0.4 is what Yadav et al. 2023 (arXiv:2306.01708) recommend
        without a held-out set. With two models λ = 0.5 is their mean.
    """

    scale: float = 0.4
    """λ, common to all models (dimensionless)."""
    _: KW_ONLY
    weights: tuple[float, ...] | None = None
    """Weights of the models in order, w_t (dimensionless); below 0 a task is unlearned; None is 1 for each."""
    normalize: bool = False
    """Whether the sum of weighted task vectors is divided by Σ w_t."""

    def __post_init__(self) -> None:
        check_settings(scale=self.scale)
        check_finite(self.weights)

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        weights = weights_for(self.weights, len(deltas))
        # As mergekit: weights that cancel are left as they are
        total_weight = sum(weights) if self.normalize and abs(sum(weights)) > 1e-8 else 1.0
        scale = self.scale / total_weight

        def merged(parts: Sequence[Tensor], base: Tensor) -> Tensor:
            return weighted_sum(parts, weights).mul_(scale)

        return merged
