"""Results: what a method returns, and what a user reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparing.hypergrad.inner.unroll import State, Unroll
from sparing.hypergrad.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a method returns: a hypergradient in two parts, through the inner run and direct."""

    through: list[Tensor]  # d_T·dθ_T/dψ, leaves as of ψ, or wider
    direct: list[Tensor]  # ∂f/∂φ at θ_T, leaves as of φ
    value: Tensor  # f(θ_T, φ), shape ()
    state: State  # θ_T and moments
    details: Mapping[str, Any] = field(default_factory=dict)  # fields of the report that the method fills
    control: list[Tensor] | None = None  # the next control variate, leaves as of ψ


class Method(Protocol):
    """A method for a hypergradient; a value, usually a frozen dataclass."""

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """Estimate the hypergradient; psi: ψ(φ), or φ itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the hypergradient was computed, its cost and its uncertainty; None for what a method does not report."""

    method: str
    """The method, in a few words."""
    steps: int
    """Inner steps T (count)."""
    seconds: float
    """Wall-clock time (s)."""
    bytes: int | None = None
    """Peak above what was held before (B): of the allocator on CUDA, of live tensors elsewhere if asked for by
    ``measure``; else None."""
    offloaded: int | None = None
    """Most that lay in main memory or in a file at once (B); None where nothing was to be offloaded."""
    directions: int | None = None
    """Directions drawn b (count)."""
    masked: int = 0
    """Directions left out because they overflowed (count)."""
    weights: Tensor | None = None
    """∇h·v of each direction, shape (b,), NaN where masked."""
    norm_squared: float | None = None
    """Unbiased estimate of ‖∇h‖² of the sampled part."""
    norm_squared_interval: tuple[float, float] | None = None
    """95 % interval of it, conservative for Rademacher, Gaussian and sphere directions; else None."""
    cosine: float | None = None
    """Expected cosine between the estimate and the truth, in the space that is sampled: that of ψ where there is a
    bottleneck."""
    growth: tuple[float, ...] = ()
    """‖y_t‖/‖v‖ after each step, root mean square over the directions that stayed finite: how a small change of
    φ grows along the run."""
    exponent: float | None = None
    """Growth per step over the second half (nat/step); above zero the run is chaotic."""
    audit: Mapping[str, float] = field(default_factory=dict)
    """cos² between each guide and the truth, estimated: a meter of its bias."""
    curvature: float | None = None
    """Largest eigenvalue of the inner Hessian, by power iteration (implicit methods)."""
    residual: float | None = None
    """‖d − Hx‖/‖d‖ of the linear solve, of ``ConjugateGradient`` with H + λI in place of H (implicit methods)."""
    warnings: tuple[str, ...] = ()
    """What the reader should worry about."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A hypergradient and where the inner run ended."""

    grad: Tree
    """∇h, in the shape of φ."""
    value: Tensor
    """h(φ) = f(θ_T, φ), shape ()."""
    theta: Tree
    """θ_T."""
    report: Report
    """How it was got."""
    control: Tree | None = None
    """Control variate for the next outer step, in the shape of ψ; None unless the method keeps one."""


def finite(tensors: list[Tensor]) -> bool:
    """Whether no element is infinite or not a number."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
