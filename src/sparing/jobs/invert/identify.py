"""Whether observations and penalty determine a field ν(x) at all, and how much of it is the observations' own word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparing.errors import UserError
from sparing.jobs.invert.arms import black_box
from sparing.jobs.invert.coefficient import Coefficient
from sparing.jobs.invert.observations import Inputs
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import Array, points


@dataclass(frozen=True, kw_only=True, slots=True)
class Identified:
    """How well the unknowns are determined at the first guess."""

    unknowns: int  # N (count)
    decided: float
    """How many of them the observations decide rather than the penalty: Σ over directions of the observations' share
    of the curvature, between 0 and N."""

    weakest: float
    """Smallest singular value of observations and penalty together: how far the loss's root moves for a unit step."""


def waves(count: int) -> Array:
    """Orthonormal cosines and sines on the grid of the unknowns, (count, count); columns 2m − 1, 2m are of wave πm."""
    phase = np.pi * points(count)[:, None] * np.arange(1, count // 2)[None, :]
    pairs = np.stack([np.cos(phase), np.sin(phase)], axis=2).reshape(count, -1)
    whole = np.concatenate([np.ones((count, 1)), pairs, np.cos(np.pi * points(count) * count / 2)[:, None]], axis=1)
    return np.asarray(whole / np.linalg.norm(whole, axis=0))


def identified(settings: Settings, inputs: Inputs) -> Identified:
    """Linearize what is observed and what is penalized around the first guess; raise if a direction of p is lost.

    Takes N + 1 solves, one along each wave: a direction that leaves no trace then has a column of zeros, where steps
    along single unknowns would leave the trace of their curvature.
    """
    problem = black_box(settings, inputs)
    coefficient = Coefficient(size=settings.field, grid=settings.points, parameter=settings.parameter)
    p, basis = coefficient.guess(settings.model, settings.seeds[0]), torch.from_numpy(waves(settings.field))
    here = problem.solve({"p": p})
    moved = [(problem.solve({"p": p + settings.probe * wave}) - here).reshape(-1) for wave in basis.T]
    # both blocks in units of the loss's root, so that their rows may stand in one matrix
    seen = torch.stack(moved, dim=1) / (settings.probe * math.sqrt(here.numel()))
    slopes: Any = torch.autograd.functional.jacobian(coefficient.slopes, p)  # type: ignore[no-untyped-call]
    held = math.sqrt(settings.penalty / settings.field) * slopes @ basis
    _, sizes, directions = torch.linalg.svd(torch.cat([seen, held]), full_matrices=False)
    # an error of the solver, seen through a difference over `probe`
    weakest, error = float(sizes[-1]), settings.tolerance / settings.probe
    if weakest <= error:
        raise UserError(
            "field", got=f"{settings.field} unknowns on a grid of {settings.points} points",
            why=_why(settings, int(directions[-1].abs().argmax()), weakest, error),
            do="pass a smaller --field, a finer --grid, more times and positions to --observe, or a larger --penalty",
        )  # fmt: skip
    share = seen.T @ seen @ torch.linalg.inv(seen.T @ seen + held.T @ held)
    return Identified(unknowns=settings.field, decided=float(share.diagonal().sum()), weakest=weakest)


def _why(settings: Settings, column: int, weakest: float, error: float) -> str:
    """Which direction is lost, and how."""
    wave = (column + 1) // 2
    lost = f"neither observations nor penalty tell the part of ν that waves {wave} times over x from nothing"
    if 2 * wave == settings.points:
        return f"{lost}: the equation takes ν half a cell beside the points, where the highest wave of the grid is zero"
    return f"{lost} (a unit of it moves them by {weakest:.1e}, the solver's own error is {error:.0e})"
