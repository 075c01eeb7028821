"""TIES: trim small changes, elect a sign for each element, and average those changes that have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.method import (
    PerModel,
    Rule,
    Slices,
    TaskVectorMethod,
    check_settings,
    for_models,
    join_into,
    slices_of,
    task_vectors,
    weighted_sum,
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
            kept = [trimmed(part, limit) for part, limit in zip(parts, limits, strict=True)]
            sign = elect(kept, weights, self.tied)
            return self.scale * disjoint_mean(kept, sign, weights, normalize=self.normalize)

        return merged


def threshold(values: Pieces, keep: float) -> float:
    """Return the smallest magnitude among the largest ⌊keep · n⌋, at least one; 0 where all are kept."""
    return 0.0 if keep >= 1 else largest(values, lambda count: _kept(count, keep))


def largest(values: Pieces, rank: Callable[[int], int]) -> float:
    """Return the magnitude of a rank, 1 for the largest; ``rank`` is given the number of elements. 0 if there are none.

    Over several slices it is a radix select: magnitudes are ordered as their bits, read as integers. A pass counts the
    patterns of the next bits under the bits already known, until those that share the known bits are few enough to be
    read into memory: two passes as a rule, and no memory that grows with n.
    """
    pieces = values()
    first, more = next(pieces), next(pieces, None)
    if more is None:
        place = rank(len(first))
        if not place:
            return math.inf
        return float(torch.kthvalue(first.abs(), len(first) - place + 1).values) if len(first) else 0.0
    dtype = first.dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int64

    def number(pattern: int) -> float:
        return float(torch.tensor([pattern], dtype=bits).view(dtype))

    known, shift, left = 0, 8 * bits.itemsize - 1, -1  # the sign's bit is zero
    while shift:
        step = min(_DIGIT, shift)
        sizes: Iterator[Tensor] = (part.abs() for part in values())
        if left >= 0:
            sizes = _between(values, number(known << shift), number(known + 1 << shift))
        counts = _digits(sizes, bits, shift, step)
        if left < 0 and not (left := rank(int(counts.sum()))):
            return math.inf
        larger = counts.sum() - counts.cumsum(0)
        digit = int((larger >= left).sum())  # the first digit of which fewer than ``left`` are larger
        known, shift, left = known << step | digit, shift - step, left - int(larger[digit])
        if counts[digit] <= _FEW:
            few = torch.empty(int(counts[digit]), dtype=dtype)  # many small tensors would keep the slices' memory apart
            join_into(few, _between(values, number(known << shift), number(known + 1 << shift)))
            return float(torch.kthvalue(few, len(few) - left + 1).values)
    return number(known)


def _kept(count: int, keep: float) -> int:
    return max(1, math.floor(keep * count + 1e-9))  # 0.29 · 100 is 28.999… in binary


_DIGIT = 11  # bits found in one pass: their counts fit into a processor's cache
_FEW = 1 << 18  # numbers that are read into memory at most: 1 MiB in float32


def _digits(sizes: Iterable[Tensor], bits: torch.dtype, shift: int, step: int) -> Tensor:
    """Histogram of the ``step`` bits below ``shift`` of magnitudes, whose higher bits are the same."""
    counts = torch.zeros(1 << step, dtype=torch.int64)
    for part in sizes:
        pattern = (part.view(bits) >> (shift - step)) & (len(counts) - 1)
        counts += torch.bincount(pattern, minlength=len(counts)).to(counts.device)
    return counts


def _between(values: Pieces, low: float, high: float) -> Iterator[Tensor]:
    """Magnitudes from ``low`` to below ``high``."""
    for part in values():
        sizes = part.abs()
        inside = mask(sizes, before(low, sizes.dtype)).sub_(mask(sizes, before(high, sizes.dtype)))
        yield sizes[inside.nonzero()[:, 0]]


def trim(delta: Tensor, keep: float) -> Tensor:
    """Zero all but the largest ⌊keep · n⌋ elements, at least one, and those that equal the smallest kept.

    Example:
        >>> trim(torch.tensor([3.0, -4.0, 1.0, 0.5, 2.0]), 0.4)
        tensor([ 3., -4.,  0.,  0.,  0.])
    """
    return trimmed(delta, threshold(slices_of(delta), keep))


def trimmed(delta: Tensor, limit: float) -> Tensor:
    """Zero the elements whose magnitude is below a limit."""
    if limit == 0:
        return delta
    return F.hardshrink(delta, before(limit, delta.dtype)) if math.isfinite(limit) else torch.zeros_like(delta)


def before(limit: float, dtype: torch.dtype) -> float:
    """The next smaller number of a dtype: "above" it is "at least" the limit, which may be infinite."""
    return (
        limit
        if math.isinf(limit)
        else float(torch.nextafter(torch.tensor(limit, dtype=dtype), -torch.ones((), dtype=dtype)))
    )


def mask(of: Tensor, above: float) -> Tensor:
    """Where numbers are above one, as 0 and 1 of their dtype: many times as fast as booleans."""
    return torch.gt(of, above, out=torch.empty_like(of))


def elect(deltas: Sequence[Tensor], weights: Sequence[float], tied: Literal["none", "plus"] = "none") -> Tensor:
    """Return the sign of the weighted sum of task vectors; at zero 0 or, for "plus", 1."""
    total = weighted_sum(deltas, weights)
    return total.sign() if tied == "none" else torch.ge(total, 0, out=total).mul_(2).sub_(1)


def disjoint_mean(
    deltas: Sequence[Tensor], sign: Tensor, weights: Sequence[float], *, normalize: bool = True, least: float = 0.0
) -> Tensor:
    """Average elementwise, or add, the task vectors that have the elected sign; zero where there is none.

    The weights that divide add up to ``least`` at least.
    """
    same = [mask(delta * sign, 0) for delta in deltas]
    total = weighted_sum([delta * each for delta, each in zip(deltas, same, strict=True)], weights)
    votes = weighted_sum(same, weights)
    # Where there are no votes the total is zero
    return total.div_(votes.clamp_(min=least or torch.finfo(votes.dtype).tiny)) if normalize else total
