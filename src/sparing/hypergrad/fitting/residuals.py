"""The problem of least squares: residuals of what a solver or an inner run returns, and rows of a prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparing.errors import UserError, require
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.trees import Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Residuals:
    """min over φ of ‖r(u(φ), φ)‖² + w ‖s(φ)‖², where u comes from a solver or is the end θ_T of an inner run.

    Of u only columns of du/dφ are used, by differences or exact tangents; r and s are differentiated exactly. Scale
    residuals so that their errors are of one size, and φ so that equal steps in its elements matter equally, for
    example by taking logarithms.

    Example:
        >>> import torch
        >>> from sparing import hypergrad as hg
        >>> times, seen = torch.arange(4.0), torch.tensor([1.0, 0.5, 0.25, 0.125])
        >>> decay = hg.Residuals(solve=lambda phi: torch.exp(-phi * times), residuals=lambda u, phi: u - seen)
        >>> hg.least_squares(decay, torch.tensor([0.1]), hg.GaussNewton()).phi
        tensor([0.6931])
    """

    solve: Bilevel | Callable[[Tree], Tree]
    """φ -> u, a tree of floating tensors, called with φ and φ ± µ along each element; or an inner run, whose end θ_T is
    u and whose outer loss is not used."""

    residuals: Callable[[Tree, Tree], Tensor]
    """r: (u, φ) -> shape (m,), in operations of torch; it draws nothing, and torch's forward mode must have its slope,
    which is compared with reverse mode, or differences, at the first guess."""

    prior: Callable[[Tree], Tensor] | None = None
    """s: φ -> shape (k,), such as the slopes of a field, under the same conditions; None for none."""

    penalty: float | Literal["evidence", "discrepancy"] = "evidence"
    """w, or the rule that chooses it again after each step. ``evidence``: the largest marginal likelihood (REML).
    ``discrepancy``: the largest w whose residuals, as far as φ moves them, are no larger than the noise (Morozov)."""

    noise: float | None = None
    """σ, the standard deviation of each residual, where it is known; None: estimated from the residuals."""

    accuracy: float = 0.0
    """Error of the residuals as they are computed, such as a solver's tolerance: a fit ends once the root mean square
    of its residuals is that small. 0: rounding alone."""

    def __post_init__(self) -> None:
        if isinstance(self.penalty, int | float):
            fits = 0 <= self.penalty < math.inf
            require(fits, "penalty", self.penalty, "it weighs a square", "pass a finite number >= 0, or a rule")
        elif self.penalty not in {"evidence", "discrepancy"}:
            why, do = "there are two rules", 'pass a number, "evidence" or "discrepancy"'
            raise UserError("penalty", got=self.penalty, why=why, do=do)
        fits, do = 0 <= self.accuracy < math.inf, "pass a finite number >= 0"
        require(fits, "accuracy", self.accuracy, "it is the size of an error", do)
        if self.noise is not None:
            fits, do = 0 < self.noise < math.inf, "pass a number above 0, or None"
            require(fits, "noise", self.noise, "it is a standard deviation", do)
