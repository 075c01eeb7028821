"""TIES: trim small changes, elect a sign for each element, and average those changes that have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.compatible import State, is_statistic
from sparing.valley.linear import added, require_scale, require_weights, task_vectors, weights_for


@dataclass(frozen=True, slots=True)
class Ties:
    """Trim, elect sign, disjoint mean: θ₀ + λ · mean of the trimmed task vectors that have the elected sign.

    Source: Yadav et al. 2023 (arXiv:2306.01708), Algorithm 1, where k is ``keep`` and λ is ``scale``.
    """

    keep: float = 0.2
    """Share of elements kept in each task vector, those largest in magnitude, in (0, 1]; k."""

    _: KW_ONLY

    scale: float = 1.0
    """Factor of the merged task vector (dimensionless), λ."""

    weights: tuple[float, ...] | None = None
    """Of the models in the election and in the mean, ≥ 0; None weighs them alike, as the paper does."""

    across: Literal["tensor", "model"] = "tensor"
    """Trim each tensor by itself, as mergekit does and as streaming needs, or the whole task vector at once, as the
    authors' code does; the latter only by ``merge``, in memory."""

    tied: Literal["none", "plus"] = "none"
    """Which sign is elected where the changes add up to exactly zero: none, so that the base stays (the paper's
    sgn(0) = 0), or plus, as in mergekit."""

    thresholds: tuple[float, ...] | None = None
    """Magnitudes from which a change is kept, one for each model; filled in by ``ready`` with ``across="model"``."""

    def __post_init__(self) -> None:
        """Refuse shares and factors out of range."""
        require_keep(self.keep)
        require_scale(self.scale)
        require_weights(self.weights)
        require(
            self.across in {"tensor", "model"} and self.tied in {"none", "plus"},
            "Ties",
            f"across={self.across!r}, tied={self.tied!r}",
            "there is no such rule",
            'pass across="tensor" or "model", tied="none" or "plus"',
        )

    @property
    def needs_base(self) -> bool:
        """True: a task vector starts at the base."""
        return True

    def ready(self, states: Sequence[State], base: State) -> Ties:
        """Return the method with the thresholds of these models, where it trims the whole task vector.

        Args:
            states: The models.
            base: Their common ancestor.

        Returns:
            Itself with ``across="tensor"``.
        """
        if self.across == "tensor":
            return self
        names = [name for name, value in base.items() if value.is_floating_point() and not is_statistic(name)]
        found = []
        for state in states:
            parts = [task_vectors(name, [state[name]], base[name])[0].abs().flatten() for name in names]
            found.append(threshold(torch.cat(parts), self.keep) if parts else 0.0)
        return replace(self, thresholds=tuple(found))

    def tensor(self, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """Merge the tensors of one name.

        Args:
            name: Canonical name.
            tensors: One of each model, of equal shapes.
            base: The same tensor of the common ancestor.

        Returns:
            The merged tensor in the dtype of the first.

        Raises:
            UserError: If the base is missing, the weights are not as many as the models, or the whole task vector
                should be trimmed and its thresholds are not known.
        """
        return added(base, self.delta(name, task_vectors(name, tensors, base)), tensors[0])

    def delta(self, name: str, deltas: Sequence[Tensor]) -> Tensor:
        """Return what is added to the base: λ times the disjoint mean.

        Args:
            name: Canonical name.
            deltas: Task vectors τ_t of this name.

        Returns:
            Shape and dtype of a task vector.

        Raises:
            UserError: As ``tensor``.
        """
        trimmed = self._trimmed(name, deltas)
        weights = weights_for(self.weights, len(trimmed))
        sign = elect(trimmed, weights, self.tied)
        return self.scale * disjoint_mean(trimmed, sign, weights)

    def _trimmed(self, name: str, deltas: Sequence[Tensor]) -> list[Tensor]:
        if self.across == "tensor":
            return [trim(delta, self.keep) for delta in deltas]
        require(
            self.thresholds is not None,
            f"Ties at {name!r}",
            'across="model"',
            "one tensor does not tell the largest changes of the whole model",
            'merge in memory, or use across="tensor"',
        )
        limits = weights_for(self.thresholds, len(deltas))
        return [torch.where(delta.abs() >= limit, delta, 0.0) for delta, limit in zip(deltas, limits, strict=True)]


def threshold(magnitudes: Tensor, keep: float) -> float:
    """Return the smallest magnitude among the largest ⌊keep · n⌋, of which there is at least one.

    Args:
        magnitudes: Shape (n,), n ≥ 1.
        keep: Share in (0, 1].

    Returns:
        A magnitude that occurs among them.
    """
    count = len(magnitudes)
    kept = max(1, math.floor(keep * count + 1e-9))  # 0.29 · 100 is 28.999… in binary
    return float(torch.kthvalue(magnitudes, count - kept + 1).values)


def trim(delta: Tensor, keep: float) -> Tensor:
    """Zero all but the largest ⌊keep · n⌋ elements (at least one) of a task vector.

    Elements as large as the smallest that is kept stay too, so that the result does not depend on their order.

    Args:
        delta: Any shape, n elements.
        keep: Share in (0, 1].

    Returns:
        A new tensor of the same shape.

    Example:
        >>> trim(torch.tensor([3.0, -4.0, 1.0, 0.5, 2.0]), 0.4)
        tensor([ 3., -4.,  0.,  0.,  0.])
    """
    if keep >= 1 or delta.numel() == 0:
        return delta
    return torch.where(delta.abs() >= threshold(delta.abs().flatten(), keep), delta, 0.0)


def elect(deltas: Sequence[Tensor], weights: Sequence[float], tied: Literal["none", "plus"] = "none") -> Tensor:
    """Return the sign of the weighted sum of task vectors: −1, 1, or for ties 0 or 1.

    Args:
        deltas: Trimmed task vectors of equal shapes.
        weights: One for each.
        tied: What is elected where the sum is exactly zero.

    Returns:
        Shape and dtype of a task vector.
    """
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total = torch.add(total, delta, alpha=weight)
    return total.sign() if tied == "none" else torch.where(total >= 0, 1.0, -1.0).to(total.dtype)


def disjoint_mean(deltas: Sequence[Tensor], sign: Tensor, weights: Sequence[float]) -> Tensor:
    """Average, element by element, the task vectors whose sign is the elected one; zero where there is none.

    Args:
        deltas: Trimmed task vectors of equal shapes; their zeros have no sign and do not count.
        sign: −1, 0 or 1.
        weights: One for each.

    Returns:
        Shape and dtype of a task vector.
    """
    total, votes = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        same = delta * sign > 0
        total = torch.add(total, torch.where(same, delta, 0.0), alpha=weight)
        votes = torch.add(votes, same.to(votes.dtype), alpha=weight)
    return torch.where(votes > 0, total / votes.where(votes > 0, torch.ones_like(votes)), 0.0)


def require_keep(keep: float) -> None:
    """Refuse a share of elements that is not in (0, 1]."""
    require(0 < keep <= 1, "keep", keep, "it is a share of the elements", "pass 0 < keep <= 1, such as 0.2")
