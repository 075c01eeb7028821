"""TIES: trim small changes, elect a sign for each element, and average those changes that have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.method import (
    PerModel,
    Rule,
    Slices,
    TaskVectorMethod,
    check_settings,
    for_models,
    slices_of,
    task_vectors,
    weights_for,
)

# ``Slices``, or what reads like them
Pieces = Callable[[], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class Ties(TaskVectorMethod):
    """Trim, elect sign, disjoint mean: θ₀ + λ · mean of the trimmed task vectors that have the elected sign.

    Source: Yadav et al. 2023 (arXiv:2306.01708), Algorithm 1, where k is ``keep`` and λ is ``scale``.
    """

    keep: PerModel = 0.2
    """Share of elements kept in each task vector, those largest in magnitude, in (0, 1], or one for each model; k."""
    _: KW_ONLY
    scale: float = 1.0
    """Factor of the merged task vector (dimensionless), λ."""
    weights: tuple[float, ...] | None = None
    """Weights of the models in the election and in the mean, ≥ 0; None for equal weights, as in the paper."""
    across: Literal["tensor", "model"] = "tensor"
    """Trim each tensor by itself, as mergekit does, or the whole task vector at once, as the authors' code does; the
    latter only in ``merge`` and ``merge_files``, which see all tensors."""
    normalize: bool = True
    """Whether the elected changes are averaged, as in the paper; else they are added up."""
    tied: Literal["none", "plus"] = "none"
    """Which sign is elected where the changes add up to exactly zero: none, so that the base stays (the paper's
    sgn(0) = 0), or plus, as in mergekit."""
    thresholds: tuple[float, ...] | None = None
    """Magnitudes from which a change is kept, one for each model; filled in by ``ready`` with ``across="model"``."""

    def __post_init__(self) -> None:
        check_settings(weights=self.weights, scale=self.scale, keep=self.keep)
        got = f"across={self.across!r}, tied={self.tied!r}"
        fine = self.across in {"tensor", "model"} and self.tied in {"none", "plus"}
        do = 'pass across="tensor" or "model", tied="none" or "plus"'
        require(fine, "Ties", got, "there is no such rule", do)

    def ready(self, models: Sequence[Mapping[str, Slices]], base: Mapping[str, Slices] | None) -> Ties:
        """Return the method with the thresholds of these models' weights, where it trims the whole task vector."""
        if self.across == "tensor" or base is None:
            return self
        origin = base

        def threshold_of(model: Mapping[str, Slices], keep: float) -> float:
            parts = [task_vectors(name, [model[name]], origin[name])[0] for name in origin]
            # In the widest of their dtypes; a model may have no weights at all
            wide = reduce(torch.promote_types, (next(part()).dtype for part in parts), torch.float32)
            parts.insert(0, slices_of(torch.zeros(0, dtype=wide)))
            return threshold(lambda: (piece.to(wide) for part in parts for piece in part()), keep)

        return replace(self, thresholds=tuple(map(threshold_of, models, for_models("keep", self.keep, len(models)))))

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        shares = for_models("keep", self.keep, len(deltas))
        found = self.thresholds if self.across == "model" else tuple(map(threshold, deltas, shares))
        why = "one tensor does not tell the largest changes of the whole model"
        do = 'merge whole models by merge or merge_files, or use across="tensor"'
        require(found is not None, f"Ties at {name!r}", 'across="model"', why, do)
        limits, weights = weights_for(found, len(deltas)), weights_for(self.weights, len(deltas))

        def merged(parts: Sequence[Tensor], base: Tensor) -> Tensor:
            trimmed = [_trimmed(part, limit) for part, limit in zip(parts, limits, strict=True)]
            sign = elect(trimmed, weights, self.tied)
            return self.scale * disjoint_mean(trimmed, sign, weights, normalize=self.normalize)

        return merged


def threshold(values: Pieces, keep: float) -> float:
    """Return the smallest magnitude among the largest ⌊keep · n⌋, at least one; 0 where all are kept."""
    return 0.0 if keep >= 1 else largest(values, lambda count: _kept(count, keep))


def largest(values: Pieces, rank: Callable[[int], int]) -> float:
    """Return the magnitude of a rank, 1 for the largest; ``rank`` is given the number of elements. 0 if there are none.

    Over several slices it is a radix select: magnitudes are ordered as their bits, read as integers. Each pass counts
    the patterns of the next 16 bits under the bits already known: two passes for float32, four for float64, and no
    memory that grows with n.
    """
    pieces = values()
    first, more = next(pieces), next(pieces, None)
    if more is None:
        return float(torch.kthvalue(first.abs(), len(first) - rank(len(first)) + 1).values) if len(first) else 0.0
    dtype = first.dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    known, left = 0, 0
    for shift in range(8 * bits.itemsize - _DIGIT, -1, -_DIGIT):
        counts = _digits(values, bits, shift, known)
        if not left:
            left = rank(int(counts.sum()))
        larger = counts.sum() - counts.cumsum(0)
        digit = int((larger >= left).sum())  # the first digit of which fewer than ``left`` are larger
        known, left = known << _DIGIT | digit, left - int(larger[digit])
    return float(torch.tensor([known], dtype=bits).view(dtype))


def _kept(count: int, keep: float) -> int:
    return max(1, math.floor(keep * count + 1e-9))  # 0.29 · 100 is 28.999… in binary


_DIGIT = 16  # bits found in one pass


def _digits(values: Pieces, bits: torch.dtype, shift: int, known: int) -> Tensor:
    """Histogram of the digit at a shift, among magnitudes whose higher bits are the known ones."""
    counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
    for part in values():
        pattern = part.abs().view(bits) >> shift
        if shift + _DIGIT < 8 * bits.itemsize:
            pattern = pattern[pattern >> _DIGIT == known]
        found = torch.bincount(pattern & (len(counts) - 1), minlength=len(counts))
        counts += found.to(counts.device)
    return counts


def trim(delta: Tensor, keep: float) -> Tensor:
    """Zero all but the largest ⌊keep · n⌋ elements, at least one, and those that equal the smallest kept.

    Example:
        >>> trim(torch.tensor([3.0, -4.0, 1.0, 0.5, 2.0]), 0.4)
        tensor([ 3., -4.,  0.,  0.,  0.])
    """
    return _trimmed(delta, threshold(slices_of(delta), keep))


def _trimmed(delta: Tensor, limit: float) -> Tensor:
    return torch.where(delta.abs() >= limit, delta, 0.0)


def elect(deltas: Sequence[Tensor], weights: Sequence[float], tied: Literal["none", "plus"] = "none") -> Tensor:
    """Return the sign of the weighted sum of task vectors; at zero 0 or, for "plus", 1."""
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        total = torch.add(total, delta, alpha=weight)
    return total.sign() if tied == "none" else torch.where(total >= 0, 1.0, -1.0).to(total.dtype)


def disjoint_mean(
    deltas: Sequence[Tensor], sign: Tensor, weights: Sequence[float], *, normalize: bool = True
) -> Tensor:
    """Average elementwise, or add, the task vectors that have the elected sign; zero where there is none."""
    total, votes = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        same = delta * sign > 0
        total = torch.add(total, torch.where(same, delta, 0.0), alpha=weight)
        votes = torch.add(votes, same.to(votes.dtype), alpha=weight)
    if not normalize:
        return total
    return torch.where(votes > 0, total / votes.where(votes > 0, torch.ones_like(votes)), 0.0)
