"""Least squares linearized at a point: damped steps, the weight of the prior, degrees of freedom, variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import RunError, UserError

Rule = Literal["evidence", "discrepancy"]

# decades on either side of the weight at which prior and data have equal traces, and points per decade
_DECADES, _POINTS = 14, 8


@dataclass(frozen=True, kw_only=True)
class Linear:
    """‖r + J d‖² + w ‖s + S d‖² as a function of a step d, float64; S may have no rows."""

    residuals: Tensor  # r, (m,)
    jacobian: Tensor  # J, (m, N)
    prior: Tensor  # s, (k,)
    slopes: Tensor  # S, (k, N)
    noise: float | None = None  # σ of each residual, where it is known

    def value(self, weight: float) -> float:
        """The sum of squares at d = 0."""
        return float(self.residuals.square().sum() + weight * self.prior.square().sum())

    def stacked(self, weight: float) -> tuple[Tensor, Tensor]:
        """[J; √w S] and [r; √w s]: one matrix, so that products of ill-conditioned blocks are never formed."""
        root = math.sqrt(weight)
        return torch.cat([self.jacobian, root * self.slopes]), torch.cat([self.residuals, root * self.prior])

    def step(self, weight: float, damping: float) -> tuple[Tensor, float]:
        """The d that minimizes the sum of squares + damping · ‖d‖², and by how much the sum of squares falls."""
        matrix, vector = self.stacked(weight)
        count = matrix.shape[1]
        basis, triangle = torch.linalg.qr(matrix)
        aim = basis.T @ vector
        # of full rank whatever J is, since the damping is positive; by QR, for torch.linalg.lstsq repeats no bits
        rows, damped = torch.linalg.qr(torch.cat([triangle, math.sqrt(damping) * torch.eye(count).to(triangle)]))
        step = -torch.linalg.solve_triangular(damped, (rows[: len(aim)].T @ aim)[:, None], upper=True)[:, 0]
        # of the projections alone: what no step can reach would cancel
        return step, float(aim.square().sum() - (aim + triangle @ step).square().sum())

    @cached_property
    def diagonal(self) -> Diagonal:
        """Coordinates in which data and prior are both diagonal; RunError where some direction moves neither."""
        moved, held = float(self.jacobian.square().sum()), float(self.slopes.square().sum())
        unit = moved / held if moved > 0 and held > 0 else 1.0
        basis, _ = torch.linalg.qr(self.stacked(unit)[0])
        if not self.determined(unit):
            raise RunError(
                "least squares: some direction of φ moves neither the residuals nor the prior, so it has no variance "
                "and no weight of a prior can be chosen; give a prior, or fewer unknowns"
            )
        top, bottom = basis[: len(self.residuals)], basis[len(self.residuals) :]
        shares, vectors = torch.linalg.eigh(top.T @ top)
        return Diagonal(
            unit=unit,
            data=shares.clamp(min=0),
            held=(bottom @ vectors).square().sum(0),
            pull=vectors.T @ (top.T @ self.residuals),
            hold=math.sqrt(unit) * vectors.T @ (bottom.T @ self.prior),
            misfit=float(self.residuals.square().sum()),
            penalty=unit * float(self.prior.square().sum()),
            rank=int(torch.linalg.matrix_rank(self.slopes)) if self.slopes.numel() else 0,
            count=len(self.residuals),
        )

    def determined(self, weight: float) -> bool:
        """Whether every direction moves residuals or prior by more than rounding."""
        matrix = self.stacked(weight)[0]
        sizes = torch.linalg.svdvals(matrix)
        fits = len(matrix) >= matrix.shape[1]
        return fits and bool(sizes[-1] > torch.finfo(sizes.dtype).eps * max(matrix.shape) * sizes[0])

    def freedom(self, weight: float) -> float:
        """Tr J(JᵀJ + wSᵀS)⁻¹Jᵀ; the matrix must be determined."""
        basis, _ = torch.linalg.qr(self.stacked(weight)[0])
        return float(basis[: len(self.residuals)].square().sum())

    def covariance(self, weight: float, noise: float) -> Tensor:
        """σ² (JᵀJ + w SᵀS)⁻¹, (N, N); the matrix must be determined."""
        _, triangle = torch.linalg.qr(self.stacked(weight)[0])
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(len(triangle)).to(triangle), upper=True)
        found: Tensor = noise**2 * inverse @ inverse.T
        return found

    def unreached(self) -> float:
        """σ² from the part of the residuals that no step reaches: its square over m − N."""
        count, unknowns = self.jacobian.shape
        if count <= unknowns:
            raise UserError(
                "noise", got=f"none for {count} residuals of {unknowns} unknowns", why="none are left to tell it",
                do='give Residuals.noise, or penalty="evidence"',
            )  # fmt: skip
        basis, _ = torch.linalg.qr(self.jacobian)
        left = self.residuals - basis @ (basis.T @ self.residuals)
        return float(left.square().sum()) / (count - unknowns)

    def choose(self, rule: Rule) -> float:
        """The weight w that a rule takes."""
        found = self.diagonal.evidence(self.noise) if rule == "evidence" else self._discrepancy()
        return found * self.diagonal.unit

    def _discrepancy(self) -> float:
        variance = self.unreached() if self.noise is None else self.noise**2
        basis, _ = torch.linalg.qr(self.jacobian)
        count = basis.shape[1]  # of the residuals' dimensions, those that φ moves: N, or m where these are fewer
        reached = float((basis.T @ self.residuals).square().sum())
        # what lies outside the range of J is the same for every weight, and scatters by more than the weight changes
        outside = float(self.residuals.square().sum()) - reached
        return self.diagonal.largest(lambda misfit: misfit - outside <= count * variance)


@dataclass(frozen=True, kw_only=True)
class Diagonal:
    """The same sum of squares, Σ over coordinates: data αᵢ, prior hβᵢ with weight w = h · unit, αᵢ + βᵢ = 1."""

    unit: float  # the weight w that h = 1 stands for
    data: Tensor  # α, (N,)
    held: Tensor  # β, (N,)
    pull: Tensor  # gradient of ½‖r‖², (N,)
    hold: Tensor  # gradient of ½ unit ‖s‖², (N,)
    misfit: float  # ‖r‖²
    penalty: float  # unit ‖s‖²
    rank: int  # of S
    count: int  # m

    def at(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the minimum at each h: ‖r + J d‖², the whole sum of squares, and Σ log(α + hβ)."""
        h = weight[..., None]
        whole = self.data + h * self.held
        gradient = self.pull + h * self.hold
        move = -gradient / whole
        misfit = self.misfit + (2 * self.pull * move + self.data * move.square()).sum(-1)
        total = self.misfit + weight * self.penalty + (gradient * move).sum(-1)
        return misfit, total, whole.log().sum(-1)

    def evidence(self, noise: float | None) -> float:
        """H of the largest marginal likelihood, with a flat prior where S says nothing (REML).

        −2 log L = (m + rank − N) log τ² + Q/τ² + log det(JᵀJ + wSᵀS) − rank log w, where τ² = Q/(m + rank − N) unless
        the noise is known. Source: Wahba 1985, generalized maximum likelihood; Wood 2011, section 2.1.
        """

        def surprise(weight: Tensor) -> Tensor:
            _, total, logdet = self.at(weight)
            left = self.count + self.rank - len(self.data)
            fit = left * total.clamp(min=1e-300).log() if noise is None else total / noise**2
            return fit + logdet - self.rank * weight.log()

        grid = _grid(self.data)
        best = grid[surprise(grid).argmin()]
        # a second grid between the neighbours of the best point
        fine = best * 10 ** (torch.linspace(-1, 1, 101).to(grid) / _POINTS)
        return float(fine[surprise(fine).argmin()])

    def largest(self, fits: Callable[[float], bool]) -> float:
        """The largest h whose ‖r + J d‖² still fits, by bisection, since it grows with h."""
        low, high = (math.log10(float(end)) for end in _grid(self.data)[[0, -1]])
        for _ in range(60):
            middle = (low + high) / 2
            found = float(self.at(torch.tensor(10**middle).to(self.data))[0])
            low, high = (middle, high) if fits(found) else (low, middle)
        return float(10.0**low)


def _grid(like: Tensor) -> Tensor:
    return 10.0 ** torch.linspace(-_DECADES, _DECADES, 2 * _DECADES * _POINTS + 1).to(like)


def student(tail: float, freedom: float) -> float:
    """Student's quantile: P(T ≤ t) = tail; of the normal law for infinite degrees of freedom.

    Example:
        >>> round(student(0.95, 4), 4), round(student(0.975, float("inf")), 4)
        (2.1318, 1.96)
    """
    if math.isinf(freedom):
        return math.sqrt(2) * float(torch.special.erfinv(torch.tensor(2 * tail - 1, dtype=torch.float64)))
    # t = √n tan θ turns the density into cosⁿ⁻¹ θ on a bounded interval; fewer than one degree has no law here
    freedom = max(freedom, 1.0)
    reach = min(math.pi / 2, 12 / math.sqrt(freedom))
    angles = torch.linspace(-reach, reach, 20_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angles.cos().clamp(min=0) ** (freedom - 1), angles)
    aim = tail * mass[-1]
    place = int(torch.searchsorted(mass, aim))
    below = mass[place - 1] if place else 0.0
    part = float((aim - below) / (mass[place] - below))
    return math.sqrt(freedom) * math.tan(float(angles[place]) + part * float(angles[1] - angles[0]))
