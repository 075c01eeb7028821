"""From derivatives along b directions to a gradient, its norm and its expected cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad.forward_mode.directions import Coordinate, Gaussian, Law, Rademacher, Sphere
from sparing.hypergrad.trees import Tree, ravel, size

Z = 1.959963984540054  # two-sided 95 % of the standard normal
_BLOCK = 16  # directions generated at once when they are summed


@dataclass(frozen=True)
class Directions:
    """The directions of an estimate, as a seed and counts: any rank can generate any of them."""

    law: Law
    count: int  # b
    size: int  # N, or n of ψ
    seed: int
    like: Tree  # gives dtype and device

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """Directions by number, shape (len(numbers), N)."""
        sample = ravel(self.like)
        return self.law.rows(
            numbers, count=self.count, size=self.size, seed=self.seed, dtype=sample.dtype, device=sample.device
        )


def draw_directions(law: Law, count: int, psi: Tree, seed: int) -> Directions:
    """Directions in the space of ψ; UserError where the law has fewer than ``count``."""
    draw = Directions(law, count, size(psi), seed, psi)
    draw.rows([0])  # checks the count before anything is run
    return draw


def masked_warning(masked: int, count: int) -> str:
    """The warning about directions that are left out."""
    return f"{masked} of {count} directions were lost or overflowed and are left out"


def combine(draw: Directions, weights: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """ĝ = (1/b) Σ w_i·v_i over the directions whose weight w_i is finite (eq. 10), and known·v_i, shape (b,).

    ``known`` is multiplied here because each direction exists only while it is summed.
    """
    left = torch.isfinite(weights)
    clean = torch.where(left, weights, torch.zeros_like(weights)) / left.sum().clamp(min=1)
    total, cross = torch.zeros_like(known), []
    for low in range(0, draw.count, _BLOCK):
        rows = draw.rows(range(low, min(low + _BLOCK, draw.count)))
        total = total + clean[low : low + _BLOCK] @ rows
        cross.append(rows @ known)
    return total, torch.cat(cross)


def combine_with_control(draw: Directions, weights: Tensor, control: Tensor) -> tuple[Tensor, Tensor]:
    """The estimate with a control variate h, shape (N,), and h + P_V(g − h) for the next step (SEGA).

    ĝ = (1/b) Σ [ω_i·h + (w_i − ω_i·h·v_i) v_i], where ω_i is the regression of w on h·v over the other directions,
    clipped to [0, 1]: it does not depend on v_i, so ĝ stays unbiased whatever h is, and a stale h costs little. Where
    directions depend on each other (drawn without replacement), ω is 1.

    Source: Hanzely, Mishchenko & Richtárik 2018; the leave-one-out multiplier is ours.
    """
    left = torch.isfinite(weights)
    rows, kept = draw.rows(range(draw.count))[left], weights[left]
    along = rows @ control
    # leave-one-out regression: sums over all directions minus the direction's own term
    both, square = kept * along, along * along
    others = square.sum() - square
    omega = torch.where(others > 0, (both.sum() - both) / others.clamp(min=torch.finfo(others.dtype).tiny), 1.0)
    independent = isinstance(draw.law, Rademacher | Gaussian | Sphere) and len(kept) > 1
    omega = omega.clamp(0.0, 1.0) if independent else torch.ones_like(kept)
    estimate = omega.mean() * control + (kept - omega * along) @ rows / len(kept)
    step = torch.linalg.pinv(rows @ rows.T) @ (kept - along)
    return estimate, control + step @ rows


def confidence(draw: Directions, weights: Tensor, known: Tensor, cross: Tensor) -> dict[str, Any]:
    """Report fields ‖g‖², its interval and the cosine, from weights and known·v_i of shape (b,) and ``known`` (N,).

    Source: Shen et al. 2024, Lemma 3.1 for the error; Wilson & Hilferty 1931 for the quantiles.
    """
    left = torch.isfinite(weights)
    kept, count = weights[left].double(), int(left.sum())
    sampled = float(kept.square().mean()) if count else math.nan
    whole = float(known.double().square().sum()) + 2 * float((kept * cross[left].double()).mean()) + sampled
    error = draw.law.excess(max(count, 1), draw.size) * sampled
    cosine = math.sqrt(max(whole, 0.0) / (max(whole, 0.0) + error)) if whole > 0 else 0.0
    interval = None if isinstance(draw.law, Coordinate) else _interval(sampled, count)
    return {"norm_squared": sampled, "norm_squared_interval": interval, "cosine": cosine}


def _interval(mean: float, count: int) -> tuple[float, float] | None:
    """The 95 % interval of a variance from the mean of ``count`` squares."""
    # w_i² has mean ‖g‖² and at most the variance it has under Gaussian directions, where b·mean/‖g‖² is χ² with b
    # degrees of freedom; so the interval covers at least 95 % for Rademacher, Gaussian and sphere directions
    if count < 1 or not math.isfinite(mean):
        return None
    spread = 2 / (9 * count)
    low, high = ((max(1 - spread + sign * Z * math.sqrt(spread), 1e-3)) ** 3 for sign in (1, -1))
    return mean / low, mean / high


def exponent(growth: Sequence[float]) -> float | None:
    """Growth per step over the second half of a run (nat/step), by least squares; None with fewer than three points."""
    late = [
        (step, math.log(size)) for step, size in enumerate(growth) if 2 * step >= len(growth) and 0 < size < math.inf
    ]
    if len(late) < 3:
        return None
    middle = sum(step for step, _ in late) / len(late)
    square = sum((step - middle) ** 2 for step, _ in late)
    return sum((step - middle) * value for step, value in late) / square
