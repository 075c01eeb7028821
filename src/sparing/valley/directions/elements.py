"""Single tensors of a direction before its length is set: noises, special directions, and how their signs are set.

Source: Li et al. 2024 (arXiv:2405.12489), §3 and §4. The second number of G is a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparing import vectors
from sparing.errors import require
from sparing.valley.directions.config import Noise, NoiseKind, Signs, SpecialKind
from sparing.vectors import Vector

_NONZERO: dict[NoiseKind, float] = {"ternary": 2 / 3, "binary": 1 / 2}  # P(ε ≠ 0); 1 for all others


def draw(kind: NoiseKind, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw one tensor of noise, float32 on the CPU, so that weights of every dtype and device get the same numbers."""
    size = tuple(shape)
    match kind:
        case "gaussian" | "shifted-gaussian":
            return torch.randn(size, generator=generator, dtype=torch.float32) + float(kind == "shifted-gaussian")
        case "uniform":
            return torch.rand(size, generator=generator, dtype=torch.float32) * 2 - 1
        case "positive-uniform":
            return torch.rand(size, generator=generator, dtype=torch.float32)
        case "ternary":
            return torch.randint(-1, 2, size, generator=generator).float()
        case "binary":
            return torch.randint(0, 2, size, generator=generator).float()
        case "one":
            return torch.ones(size, dtype=torch.float32)


def expected_consistency(noise: Noise, positive_share: float, *, strict: bool = False) -> float:
    """Return the expected sign-consistency ratio of a noise and weights.

    An element of the noise is positive, given that it is not zero, with probability q: 1/2 for the first three, 0.8413
    (Φ(1)) for G(1,1), 1 for the last three. With π the share of positive weights the ratio is ``πq + (1 − π)(1 − q)``,
    and a sign-change ratio r brings it to ``r + (1 − r)`` times that: 0.5 + r/2 for symmetric noise.

    Args:
        noise: Kind and sign are read.
        positive_share: π, positive weights as a share of those that are not zero, in [0, 1].
        strict: Count zeros of the noise as disagreement, as the table of §1.4 does (1/3 for {−1,0,1}); otherwise they
            are left out, as in ``Resolved.sign_consistency``.

    Returns:
        In [0, 1].

    Raises:
        UserError: If the share is not in [0, 1].

    Example:
        >>> expected_consistency(Noise("gaussian", sign=0.5), 0.3)
        0.75
    """
    why, do = "it is a share of the weights", "pass a number in [0, 1]"
    require(0 <= positive_share <= 1, "positive_share", positive_share, why, do)
    up = {"gaussian": 0.5, "uniform": 0.5, "ternary": 0.5, "shifted-gaussian": 0.5 * math.erfc(-math.sqrt(0.5))}
    above = up.get(noise.kind, 1.0)
    raw = positive_share * above + (1 - positive_share) * (1 - above)
    ratio = {"raw": 0.0, "consistent": 1.0}[noise.sign] if isinstance(noise.sign, str) else float(noise.sign)
    return (ratio + (1 - ratio) * raw) * (_NONZERO.get(noise.kind, 1.0) if strict else 1.0)


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
        assert initial is not None  # Special asks for it
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
