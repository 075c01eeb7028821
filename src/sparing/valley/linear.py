"""Merging by arithmetic: the weighted mean of models, and the base plus the sum of what each of them learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.method import Method
from sparing.valley.slices import Slices, zip_slices

# Slices of the task vectors, one of each model -> what is added to that slice of the base
Rule = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Linear(Method):
    """The weighted mean of the models: Σ w_t θ_t / Σ w_t.

    Example:
        >>> Linear((3.0, 1.0)).tensor("w", [torch.zeros(1), torch.ones(1)])
        tensor([0.2500])
    """

    weights: tuple[float, ...] | None = None
    """Of the models in order, ≥ 0 (dimensionless); None for equal weights."""

    def __post_init__(self) -> None:
        check_weights(self.weights)

    @property
    def needs_base(self) -> bool:
        """False: a mean needs no ancestor."""
        return False

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        weights = weights_for(self.weights, len(models))
        for parts in zip_slices(models):
            merged, total = torch.zeros_like(upcast(parts[0])), 0.0
            for part, weight in zip(parts, weights, strict=True):
                if weight > 0:
                    total += weight
                    # As a running mean, equal numbers average to themselves; a sum of w · θ would round them
                    merged = torch.lerp(merged, upcast(part, merged), weight / total)
            yield merged.to(parts[0].dtype)


@dataclass(frozen=True, slots=True)
class TaskArithmetic(Method):
    """The base plus the sum of task vectors: θ₀ + λ Σ w_t (θ_t − θ₀).

    Source: Ilharco et al. 2023 (arXiv:2212.04089); λ = 0.4 is what Yadav et al. 2023 (arXiv:2306.01708) recommend
    where no held-out set can tell. With two models λ = 0.5 is their mean.
    """

    scale: float = 0.4
    """λ, common to all models (dimensionless)."""
    _: KW_ONLY
    weights: tuple[float, ...] | None = None
    """Of the models in order, w_t ≥ 0 (dimensionless); None is 1 for each."""

    def __post_init__(self) -> None:
        check_scale(self.scale)
        check_weights(self.weights)

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        found = task_vectors(name, models, base)
        yield from add_to_base(base, map(self.rule(name, found), zip_slices(found)), models[0])

    def rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        """Return how slices are merged: to λ Σ w_t τ_t.

        Args:
            name: Canonical name (not used).
            deltas: Task vectors τ_t of this name; only their number is used.

        Returns:
            What is added to a slice of the base.

        Raises:
            UserError: If the weights are not as many as the models.
        """
        weights = weights_for(self.weights, len(deltas))

        def merged(parts: Sequence[Tensor]) -> Tensor:
            total = torch.zeros_like(parts[0])
            for part, weight in zip(parts, weights, strict=True):
                total = torch.add(total, part, alpha=weight)
            return self.scale * total

        return merged


def task_vectors(name: str, models: Sequence[Slices], base: Slices | None) -> list[Slices]:
    """Return τ_t = θ_t − θ₀ in float32, or float64 where the models are."""
    require(base is not None, f"base at {name!r}", "none", "this method merges what was learned since", "pass base=...")
    assert base is not None

    def difference(model: Slices) -> Slices:
        return lambda: (upcast(part, origin) - upcast(origin, part) for part, origin in zip_slices([model, base]))

    return [difference(model) for model in models]


def add_to_base(base: Slices | None, deltas: Iterable[Tensor], first: Slices) -> Iterator[Tensor]:
    """Add slices of a merged task vector to the base, in the dtype of the first model."""
    assert base is not None
    for origin, template, delta in zip(base(), first(), deltas, strict=True):
        yield (origin.to(delta) + delta).to(template.dtype)


def upcast(tensor: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return a tensor in the dtype of the arithmetic: float32, or float64 if it or ``beside`` is."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(dtype) if beside is None else tensor.to(beside.device, torch.promote_types(dtype, beside.dtype))


def weights_for(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    """Return one weight for each of ``count`` models, 1 by default; refuse another number of them."""
    if weights is None:
        return [1.0] * count
    why = f"{count} models need as many weights"
    require(len(weights) == count, "weights", f"{len(weights)} of them", why, "pass one for each model, in order")
    return weights


def check_weights(weights: Sequence[float] | None) -> None:
    """Refuse weights that are negative, not finite or all zero."""
    if weights is None:
        return
    fine = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
    why = "a mean needs finite weights ≥ 0 of which one is positive"
    require(fine, "weights", tuple(weights), why, "pass numbers such as (0.5, 0.5)")


def check_scale(scale: float) -> None:
    """Refuse a scale that is not finite."""
    require(math.isfinite(scale), "scale", scale, "task vectors are multiplied by it", "pass a finite number")
