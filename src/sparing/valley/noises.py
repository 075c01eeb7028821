"""The seven common noises: generators in, tensors out, and how often their signs agree with weights.

Source: Li et al. 2024 (arXiv:2405.12489), §3. The second number of G is a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.config import Noise, NoiseKind

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


def moments(kind: NoiseKind) -> tuple[float, float]:
    """Return E[ε] and Var[ε] of one element, in closed form."""
    return {
        "gaussian": (0.0, 1.0),
        "uniform": (0.0, 1 / 3),
        "ternary": (0.0, 2 / 3),
        "shifted-gaussian": (1.0, 1.0),
        "positive-uniform": (0.5, 1 / 12),
        "binary": (0.5, 1 / 4),
        "one": (1.0, 0.0),
    }[kind]


def expected_consistency(noise: Noise, positive_share: float, *, strict: bool = False) -> float:
    """Return the expected sign-consistency ratio of a noise with weights.

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
        UserError: If the share is no share.

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
