"""Signs of a direction and of the weights: conventions, alignment, and how far they agree.

Source: Li et al. 2024 (arXiv:2405.12489), §3 and §4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing import vectors
from sparing.errors import UserError
from sparing.valley.config import Signs, SpecialKind
from sparing.vectors import Vector


def sign(x: Tensor) -> Tensor:
    """Return +1 above zero and −1 elsewhere, at zero too: the paper's convention."""
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


def sgp(x: Tensor) -> Tensor:
    """Return 1 above zero and 0 elsewhere."""
    return (x > 0).to(x.dtype)


def centred(theta: Tensor, live: Tensor | None = None) -> Tensor:
    """Return θ − μ in float64, μ the mean of the live weights of this tensor; masked ones are left to the caller."""
    wide = theta.double()
    kept = wide if live is None else wide[live]
    return wide - kept.mean() if kept.numel() else wide


def special_direction(
    kind: SpecialKind, theta: Tensor, *, initial: Tensor | None, live: Tensor | None = None
) -> Tensor:
    """Return one tensor of a special direction."""
    if kind == "initial":
        if initial is None:
            raise UserError("Special.initial", got=None, why="this direction is θ₀ itself", do="pass initial=")
        return initial
    if kind == "self":
        return theta
    value = centred(theta, live) if kind.startswith("centred") else theta
    return sign(value) if kind.endswith("sign") else sgp(value)


def set_signs(epsilon: Tensor, theta: Tensor, signs: Signs, generator: torch.Generator | None = None) -> Tensor:
    """Set the signs of one tensor of a direction and keep its magnitudes."""
    if signs == "raw":
        return epsilon
    turned = epsilon.abs() * sign(theta).to(epsilon.dtype)
    if signs == "consistent":
        return turned
    # At one state of the generator the elements chosen at a small ratio are among those at a larger one
    chosen = torch.rand(epsilon.shape, generator=generator, dtype=torch.float32) < float(signs)
    return torch.where(chosen.to(epsilon.device), turned, epsilon)


class SignAlignment(NamedTuple):
    """How far a direction and the weights agree; NaN where there is nothing to compare."""

    plain: float  # Sign-consistency ratio: share of equal signs among elements where neither is zero, in [0, 1]
    weighted: float  # the same, every element with the weight |ε θ|
    cosine: float  # ⟨ε, θ⟩ / (‖ε‖ ‖θ‖), in [−1, 1]; weighted and cosine share their sign about 1/2 and 0


def sign_alignment(direction: Vector, theta: Vector) -> SignAlignment:
    """Compare a direction with the weights, in float64.

    Example:
        >>> sign_alignment({"w": torch.tensor([1.0, -1.0, 5.0])}, {"w": torch.tensor([3.0, 1.0, 0.0])})[:2]
        (0.5, 0.75)
    """
    inner = float(vectors.dot(direction, theta))
    mass = float(vectors.dot({n: x.abs() for n, x in direction.items()}, {n: x.abs() for n, x in theta.items()}))
    lengths = float(vectors.norm(direction)) * float(vectors.norm(theta))
    return SignAlignment(
        plain=float(vectors.sign_agreement(direction, theta)),
        weighted=(1 + inner / mass) / 2 if mass > 0 else math.nan,
        cosine=inner / lengths if lengths > 0 else math.nan,
    )
