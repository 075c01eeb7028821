"""Directions along guesses of the gradient, and random ones orthogonal to them; unbiased whatever the guesses are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import RunError, UserError
from sparing.seeds import stream

_DEPENDENT = 1e-6  # a guess is dropped where less than this share of its length is new


@dataclass(frozen=True)
class Frame:
    """An orthonormal frame: guesses first, random directions of their complement after."""

    rows: Tensor  # shape (b, N), orthonormal
    guides: tuple[int, ...]  # row k follows guess guides[k]; dependent guesses are dropped
    guesses: Tensor  # the guesses, each of length one, shape (r, N)


def build_frame(guesses: Sequence[Tensor], count: int, seed: int) -> Frame:
    """Orthonormalize guesses, vectors of shape (N,), and add random rows orthogonal to them, b = ``count`` in all."""
    size = len(guesses[0])
    if not len(guesses) < count <= size:
        raise UserError(
            "directions", got=count, why=f"{len(guesses)} guides and 1 … {size} directions in all are needed",
            do="pass more directions than guides, at most as many as φ (or ψ) has elements",
        )  # fmt: skip
    basis: list[Tensor] = []
    left: list[int] = []
    units = [guess / guess.norm().clamp(min=torch.finfo(guess.dtype).tiny) for guess in guesses]
    for number, unit in enumerate(units):
        # projected twice: one pass of Gram-Schmidt leaves a remainder of the size of rounding over |rest|
        rest = _without(_without(unit, basis), basis)
        if torch.isfinite(rest).all() and rest.norm() > _DEPENDENT:
            basis.append(rest / rest.norm())
            left.append(number)
    generator = stream(seed, "complement")
    draws = torch.randn(count - len(basis), size, generator=generator, dtype=torch.float64).to(guesses[0])
    fresh = [_without(_without(draw, basis), basis) for draw in draws]
    frame = torch.linalg.qr(torch.stack(fresh).T).Q.T
    return Frame(torch.stack([*basis, *frame]) if basis else frame, tuple(left), torch.stack(units))


def _without(vector: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """The part of a vector that is orthogonal to an orthonormal basis."""
    for unit in basis:
        vector = vector - (vector @ unit) * unit
    return vector


@dataclass(frozen=True)
class Guided:
    """The estimate, and how good the guesses were."""

    grad: Tensor  # shape (N,)
    norm_squared: float  # unbiased estimate of ‖g‖²
    error: float  # expected squared error of the estimate
    audit: dict[int, float]  # guess -> estimated cos² to the truth


def guided_estimate(frame: Frame, weights: Tensor) -> Guided:
    """ĝ = UUᵀg + ((N − r)/(b − r))·QQᵀg from g along each row, shape (b,); NaN where a direction overflowed.

    Its relative error is ((N − r)/(b − r) − 1)·(1 − cos²(U, g)): the part along the guesses has none.

    Source: Maheswaranathan et al. 2019 (Guided ES); Fournier et al. 2023 (gradient guesses).
    """
    size = frame.rows.shape[1]
    r, finite = len(frame.guides), torch.isfinite(weights)
    if not finite[:r].all():
        # nothing else knows the gradient along a guide, which is most of it where the guide is good
        raise RunError("the direction of a guide overflowed or was lost with its rank; call again, or pass no guides")
    clean = torch.where(finite, weights, torch.zeros_like(weights))
    # the mean is over the random rows that did not overflow
    drawn = max(int(finite[r:].sum()), 1)
    scale = (size - r) / drawn
    inside = clean[:r] @ frame.rows[:r]
    grad = inside + scale * (clean[r:] @ frame.rows[r:])
    outside = scale * float(clean[r:].double().square().sum())
    norm_squared = float(clean[:r].double().square().sum()) + outside
    along = {n: float((frame.guesses[n] @ inside).square()) for n in frame.guides}
    audit = {n: value / norm_squared if norm_squared > 0 else 0.0 for n, value in along.items()}
    return Guided(grad, norm_squared, max(scale - 1, 0.0) * outside, audit)
