"""Merges that follow from the angles between models: SLERP of two, its mean of many, and model stock.

Each gives a combination of the models whose factors depend on their inner products alone. So a first pass reads the
inner products, in float64, and a second one combines.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.valley.merging.method import (
    Method,
    Slices,
    check_finite,
    difference,
    read_rows,
    require_origin,
    upcast,
    weights_for,
    zip_slices,
)

# What is one vector: a whole tensor, each of its rows (along the last axis), or each of its columns (along the first)
Across = Literal["tensor", "rows", "columns"]


class Combination(Method, Protocol):
    """A method that combines models, or their task vectors, with factors that follow from inner products."""

    __slots__ = ()

    across: Across

    @property
    def around_base(self) -> bool:
        """Whether vectors are counted from the base: task vectors."""
        return False

    @property
    def needs_base(self) -> bool:
        """Whether it merges task vectors."""
        return self.around_base

    @abstractmethod
    def _factors(self, name: str, gram: Tensor) -> Tensor:
        """Return each model's factors, shape (models, groups), float64, of inner products (models, models, groups)."""
        ...

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        origins = [require_origin(name, base)] if self.around_base else []
        factors = self._factors(name, inner_products(models, self.across, origins))
        width, at, dtype = width_of(models[0].shape, self.across), 0, next(iter(models[0]())).dtype
        scales: Sequence[float | Tensor] = factors[:, 0].tolist()
        for parts, origin in _vectors(models, origins, width):
            if self.across == "rows":
                scales = list(factors[:, at : at + len(parts[0]), None].to(parts[0]))
                at += len(parts[0])
            elif self.across == "columns":
                scales = list(factors[:, None, :].to(parts[0]))
            merged = parts[0] * scales[0]
            for part, scale in zip(parts[1:], scales[1:], strict=True):
                merged += part * scale
            if origin is not None:
                merged += origin.to(merged)
            yield merged.to(dtype).view(-1)


def width_of(shape: tuple[int, ...], across: Across) -> int:
    """Length of a row (count) as a tensor is read; 0 where it is one vector and rows do not matter."""
    if across == "tensor" or len(shape) < 2 or not math.prod(shape):
        return 0 if across == "tensor" or not math.prod(shape) else math.prod(shape)
    return shape[-1] if across == "rows" else math.prod(shape) // shape[0]


def _vectors(
    models: Sequence[Slices], origins: Sequence[Slices], width: int
) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Read models, less the origin where there is one, in lockstep: flat, or as whole rows, shape (rows, width)."""
    every = [*models, *origins]
    for parts in zip(*(read_rows(one, width) for one in every), strict=True) if width else zip_slices(every):
        mine, origin = parts[: len(models)], parts[-1] if origins else None
        yield [upcast(part) if origin is None else difference(part, origin) for part in mine], origin


def inner_products(models: Sequence[Slices], across: Across = "tensor", origins: Sequence[Slices] = ()) -> Tensor:
    """Inner products in float64, shape (models, models, groups); groups are 1, the rows or the columns."""
    shape = models[0].shape
    width = width_of(shape, across)
    found: list[Tensor] = []
    # A vector has no columns: all of it is one
    columns = across == "columns" and len(shape) > 1
    for parts, _ in _vectors(models, origins, width):
        each = [part.double() for part in parts]
        if not width:
            # One by one: half the time of a product of matrices that are two rows high
            one = torch.stack([torch.stack([torch.dot(a, b) for b in each]) for a in each])[:, :, None]
            found = [one.cpu() if not found else found[0] + one.cpu()]
            continue
        wide = torch.stack(each)
        if not columns:
            found.append(torch.einsum("irw,jrw->ijr", wide, wide).cpu())
            continue
        one = torch.einsum("irw,jrw->ijw", wide, wide)
        found = [one.cpu() if not found else found[0] + one.cpu()]
    return torch.cat(found, dim=2) if found else torch.zeros(len(models), len(models), 0, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Slerp(Combination):
    """Spherical interpolation of two models: from the first (t = 0) to the second (t = 1) along an arc.

    (sin((1 − t) Ω) θ_1 + sin(t Ω) θ_2) / sin Ω with Ω the angle between them, tensor by tensor; a straight line where
    they point the same, or the opposite, way.

    Source: Shoemake 1985, "Animating rotation with quaternion curves" (doi:10.1145/325165.325242).

    Example:
        >>> Slerp(0.5).tensor("w", [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
        tensor([0.7071, 0.7071])
    """

    t: float = 0.5
    """Place between the models, 0 to 1 (dimensionless)."""
    _: KW_ONLY
    across: Across = "tensor"
    """What is treated as one vector: the tensor, each row or each column."""
    of_changes: bool = False
    """Whether the arc is that of the task vectors, around the base, and not of the weights."""
    straight_above: float = 0.9995
    """Cosine (absolute) above which the line is straight, up to 1. mergekit's slerp has 0.9995, its nuslerp 1."""

    def __post_init__(self) -> None:
        require(math.isfinite(self.t), "t", self.t, "it is a place between two models", "pass a number from 0 to 1")
        do, why = 'pass "tensor", "rows" or "columns"', "there are no such vectors"
        require(self.across in {"tensor", "rows", "columns"}, "across", repr(self.across), why, do)
        require(0 <= self.straight_above <= 1, "straight_above", self.straight_above, "it is a cosine", "pass 0.9995")

    @property
    def around_base(self) -> bool:
        """Whether vectors are counted from the base: task vectors."""
        return self.of_changes

    def _factors(self, name: str, gram: Tensor) -> Tensor:
        why, do = "it goes from one model to another", "pass two, or use MultiSlerp"
        require(len(gram) == 2, f"models of Slerp at {name!r}", len(gram), why, do)
        norms = gram.diagonal().sqrt().T
        # A vector of zeros is at right angles to all
        first, second = torch.where(norms > 0, norms, 1.0)
        # One by one: the product of two small norms may be zero
        cosine = (gram[0, 1] / first / second).clamp(-1, 1)
        sine = (1 - cosine.square()).sqrt()
        straight = (cosine.abs() > self.straight_above) | (sine < 1e-8)
        angle, sine = torch.acos(cosine), torch.where(straight, 1.0, sine)
        arc = torch.stack([torch.sin((1 - self.t) * angle), torch.sin(self.t * angle)]) / sine
        line = torch.tensor([[1 - self.t], [self.t]], dtype=gram.dtype)
        return torch.where(straight, line, arc)


@dataclass(frozen=True, slots=True)
class MultiSlerp(Combination):
    """The weighted mean of models on a sphere: their unit vectors are averaged there, their norms arithmetically.

    It starts at the normalised mean of the unit vectors. That is mergekit's multi-SLERP: the tangent step it takes from
    there is zero, because the mean of the projections onto the tangent space at the mean vanishes. With ``steps`` it
    continues, along the logarithmic map, to the Karcher mean, where the weighted sum of the arcs to all models is zero.

    Source: Goddard 2025, "Multi-SLERP" (goddard.blog/posts/multislerp-wow-what-a-cool-idea); Karcher 1977,
    "Riemannian center of mass and mollifier smoothing" (doi:10.1002/cpa.3160300502).
    """

    weights: tuple[float, ...] | None = None
    """Weights of the models in order (dimensionless); they are divided by their sum; None for equal weights."""
    _: KW_ONLY
    steps: int = 0
    """Steps towards the Karcher mean (count); 10 are enough."""
    tolerance: float = 1e-5
    """Length of a step below which it stops, and norm below which a model is left out (radians, dimensionless)."""
    of_changes: bool = False
    """Whether the sphere is around the base, and not around zero."""
    normalize: bool = True
    """Whether weights are divided by their sum."""

    def __post_init__(self) -> None:
        check_finite(self.weights)
        divides = self.normalize and self.weights is not None
        why, do = "their sum divides", "pass weights that do not cancel, or normalize=False"
        require(not divides or abs(sum(self.weights or ())) > 1e-8, "weights", self.weights, why, do)
        require(self.steps >= 0, "steps", self.steps, "it is a count", "pass 0 or more")

    @property
    def across(self) -> Across:  # type: ignore[override]
        """A tensor is one vector."""
        return "tensor"

    @property
    def around_base(self) -> bool:
        """Whether vectors are counted from the base: task vectors."""
        return self.of_changes

    def _factors(self, name: str, gram: Tensor) -> Tensor:
        inner = gram[:, :, 0] if gram.shape[2] else torch.zeros(gram.shape[:2], dtype=gram.dtype)
        norms = inner.diagonal().sqrt()
        weights = torch.tensor(weights_for(self.weights, len(inner)), dtype=gram.dtype)
        # A model of zeros has no direction, only a norm
        shares = torch.where(norms > (self.tolerance if self.steps else 0.0), weights, 0.0)
        if self.normalize:
            weights, shares = weights / weights.sum(), shares / shares.sum() if shares.sum() else shares
        units = norms.clamp(min=1e-30)
        cosines = inner / units[:, None] / units[None, :]
        length = float((shares @ cosines @ shares).clamp(min=0).sqrt())
        if length < 1e-8:
            if len(inner) == 2 and not self.steps:
                return weights[:, None]
            if not bool(norms.any()):
                return torch.zeros(len(inner), 1, dtype=gram.dtype)
            why, do = "opposite models have no mean on a sphere", "pass other weights, or use Linear"
            raise UserError(f"MultiSlerp at {name!r}", got="models that cancel", why=why, do=do)
        mean = shares / length
        for _ in range(self.steps):
            to_models = (cosines @ mean).clamp(-1, 1)
            angles = torch.acos(to_models)
            pull = torch.where(angles < self.tolerance, 0.0, shares * angles / torch.sin(angles).clamp(min=1e-30))
            tangent = pull - (pull @ to_models) * mean
            step = float((tangent @ cosines @ tangent).clamp(min=0).sqrt())
            if step < self.tolerance:
                break
            mean = math.cos(step) * mean + math.sin(step) / step * tangent
            mean = mean / (mean @ cosines @ mean).sqrt()
        return (mean * (weights @ norms) / units)[:, None]


@dataclass(frozen=True, slots=True)
class ModelStock(Combination):
    """Between the base and the mean of fine-tuned models: as far as the angle between their changes says.

    t = N cos Ω / (1 + (N − 1) cos Ω), with Ω the mean angle between the task vectors of N models: 1 where they agree,
    0 where they are at right angles. Tensor by tensor, as the authors do.

    Source: Jang et al. 2024, "Model Stock" (arXiv:2403.19522).
    """

    across: Across = "tensor"
    """What has an angle of its own: the tensor, each row ("filter-wise") or each column."""
    like_mergekit: bool = False
    """Whether products of two norms below 1e-6 count as 1e-6, as in mergekit: small changes then stay near the base."""

    @property
    def around_base(self) -> bool:
        """True: angles are those of task vectors."""
        return True

    def _factors(self, name: str, gram: Tensor) -> Tensor:
        count = len(gram)
        why, do = "one model has no angle to another", "pass two or more"
        require(count > 1, f"models of ModelStock at {name!r}", count, why, do)
        norms = gram.diagonal().sqrt().T
        first, second = torch.triu_indices(count, count, offset=1)
        least = 1e-6 if self.like_mergekit else torch.finfo(norms.dtype).tiny
        pairs = gram[first, second] / (norms[first] * norms[second]).clamp(min=least)
        cosine = pairs.clamp(-1, 1).mean(0)
        below = 1 + (count - 1) * cosine
        # Changes that cancel leave the base
        t = torch.where(below.abs() < 1e-6, 0.0, count * cosine / torch.where(below.abs() < 1e-6, 1.0, below))
        return (t / count).expand(count, -1)
