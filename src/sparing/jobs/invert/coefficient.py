"""From unconstrained numbers p to a positive coefficient ν, and back. The chain rule lives here, once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sparing.jobs.invert.equations import Equation
from sparing.jobs.invert.observations import FIELD
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import interpolation, points, roughness_rows
from sparing.seeds import stream

Parameter = Literal["log", "square"]
_FORWARD: dict[Parameter, Callable[[Tensor], Tensor]] = {"log": torch.exp, "square": torch.square}
_BACK: dict[Parameter, Callable[[Tensor], Tensor]] = {"log": torch.log, "square": torch.sqrt}


@lru_cache(maxsize=8)
def _spread(count: int, grid: int) -> Tensor:
    """Trigonometric interpolation from ``count`` to ``grid`` points, shape (grid, count)."""
    return torch.from_numpy(interpolation(count, points(grid)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficient:
    """ν as a function of p: ν = exp(p) or p², for a field after p was interpolated to the solver's grid.

    All derivatives are taken with respect to p, through ``value``; no derivative of it is written out anywhere.
    The released code of the paper perturbs p and then multiplies by dν/dp = 2p once more.

    Example:
        >>> Coefficient(size=0, grid=64, parameter="square").value(torch.tensor([3.0])).item()
        9.0
    """

    size: int  # unknowns of a field (count); 0: one number
    grid: int  # points of the solver (count)
    parameter: Parameter = "log"  # what keeps ν positive
    smoothness: int = 1  # order of the derivative that is penalized

    def value(self, p: Tensor) -> Tensor:
        """ν, shape () or (grid,), from p, shape (1,) or (size,); differentiable."""
        forward = _FORWARD[self.parameter]
        return forward(_spread(self.size, self.grid) @ p) if self.size else forward(p[0])

    def roughness(self, p: Tensor) -> Tensor:
        """Mean of the squares of ``bends``, a scalar; 0 for one number."""
        return self.bends(p).square().mean() if self.size else p.new_zeros(())

    def bends(self, p: Tensor) -> Tensor:
        """Derivatives of log ν along πx, of the order ``smoothness``, times π, (size,); differentiable."""
        log = p if self.parameter == "log" else torch.log(p.square())
        return torch.from_numpy(roughness_rows(self.size, self.smoothness).copy()).to(p.dtype) @ log

    def band(self, p: Tensor, covariance: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
        """Ends of the interval of ν, () or (grid,), from the covariance of p and a quantile of its law."""
        spread = _spread(self.size, self.grid) if self.size else torch.eye(1, dtype=p.dtype)
        at, half = spread @ p, quantile * (spread @ covariance * spread).sum(1).clamp(min=0).sqrt()
        low, high = self.ends(at - half, at + half)
        return (low, high) if self.size else (low[0], high[0])

    def ends(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Least and largest ν between two ends of p, any shape; p and −p are one ν = p²."""
        one, other = _FORWARD[self.parameter](low), _FORWARD[self.parameter](high)
        least = torch.minimum(one, other)
        if self.parameter == "square":
            least = torch.where(low.sign() * high.sign() < 0, 0.0, least)
        return least, torch.maximum(one, other)

    def guess(self, equation: Equation, seed: int, start: int = 0, starts: int = 1) -> Tensor:
        """Where a run starts: p in float64, shape (1,) or (size,).

        A number is uniform in (0, highest]; a constant field log-uniform within a factor of 3 of the true mean. Of
        several starts each has an equal part of that range.
        """
        drawn = torch.rand(1, generator=stream(seed, "guess", *([start] if start else [])), dtype=torch.float64)
        drawn = (start + drawn) / starts
        if self.size:
            nu = FIELD[equation.name] * torch.exp(math.log(3) * (2 * drawn - 1)).expand(self.size)
        else:
            # 1 − drawn is in (0, 1]: a ν of zero would have no logarithm
            nu = equation.highest * (1 - drawn)
        return _BACK[self.parameter](nu).clone()


def coefficient_of(settings: Settings) -> Coefficient:
    """The coefficient that a run seeks through the solver."""
    return Coefficient(
        size=settings.field, grid=settings.points, parameter=settings.parameter, smoothness=settings.smoothness
    )
