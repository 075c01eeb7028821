"""The two ways from ν to a solution, a solver as a black box and a network, and whether they determine a field ν(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.forward_mode.directions import Hadamard, Law, Orthonormal, Rademacher
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.jobs.invert import pinn
from sparing.jobs.invert.coefficient import Coefficient, coefficient_of
from sparing.jobs.invert.observations import Inputs
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.solver import solve
from sparing.jobs.invert.spectral import Array, interpolation, points
from sparing.seeds import stream

Phi = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arm:
    """What the outer loop needs to know of one way from ν to a solution."""

    coefficient: Coefficient  # from p to ν
    method: Any  # estimates the hypergradient
    problem: Callable[[Any], hg.Bilevel | hg.BlackBox]  # from what an outer step left to the next (weights, or None)
    start: Callable[[int], Any]  # that state before the first step, by seed
    solution: Callable[[Tensor, Any], Array]  # u on the judging grid, (512, grid), from p and that state


LAWS: dict[str, Law] = {"rademacher": Rademacher(), "orthonormal": Orthonormal(), "hadamard": Hadamard()}


def simulation(settings: Settings, inputs: Inputs) -> Callable[[Phi], Tensor]:
    """From φ = {"p"} to the solution where it was observed, (times, positions); RunError where the solver fails."""
    coefficient = coefficient_of(settings)
    sampling = interpolation(settings.points, inputs.where).T

    def run(phi: Phi) -> Tensor:
        # detached: nobody differentiates the solver, only the loss around it
        nu = coefficient.value(phi["p"].detach()).numpy()
        u = solve(settings.model, nu, inputs.times, grid=settings.points, tolerance=settings.tolerance)
        return torch.from_numpy(u @ sampling)

    return run


def residuals(settings: Settings, inputs: Inputs) -> hg.Residuals:
    """The inverse problem around the solver, as a sum of squares: r = u − seen.

    The prior's rows are derivatives of log ν over √N, so that ‖r‖² + w‖s‖² is m times the mean square and the penalty.
    """
    coefficient = coefficient_of(settings)
    run = simulation(settings, inputs)

    def far(phi: Phi) -> Tensor:
        # a step that went too far is made again, shorter, where residuals are not finite
        lost = torch.full_like(inputs.values, math.nan)
        # so far that ν is 0 or infinite in float64, which the solver would call a mistake of the user's
        if not torch.isfinite(coefficient.value(phi["p"]).log()).all():
            return lost
        try:
            return run(phi)
        except RunError:
            return lost

    return hg.Residuals(
        solve=far,
        residuals=lambda u, phi: (u - inputs.values).flatten(),
        prior=(lambda phi: coefficient.bends(phi["p"]) / math.sqrt(settings.field)) if settings.field else None,
        penalty=settings.penalty if isinstance(settings.penalty, str) else settings.penalty * inputs.values.numel(),
        accuracy=settings.tolerance,
    )


def black_box(settings: Settings, inputs: Inputs) -> hg.BlackBox:
    """The same for hypergradients: mean (u − seen)² + penalty · roughness; that enters exactly, through φ."""
    coefficient = coefficient_of(settings)

    def loss(u: Tensor, phi: Phi) -> Tensor:
        misfit = (u - inputs.values).square().mean()
        return misfit + settings.weight * coefficient.roughness(phi["p"]) if settings.field else misfit

    return hg.BlackBox(solve=simulation(settings, inputs), outer=loss)


def solution(settings: Settings, inputs: Inputs, p: Tensor) -> Array:
    """What the solver makes of p on the judging grid, (512, grid)."""
    coefficient = coefficient_of(settings)
    nu = coefficient.value(p).numpy()
    return solve(settings.model, nu, inputs.grid_times, grid=settings.points, tolerance=settings.tolerance)


def numerical(settings: Settings, inputs: Inputs) -> Arm:
    """The solver's arm: central differences along random directions, exact outer part."""
    problem = black_box(settings, inputs)
    coefficient = coefficient_of(settings)

    return Arm(
        coefficient=coefficient,
        method=ZerothOrder(directions=settings.drawn, step=settings.numerical.probe, law=LAWS[settings.numerical.law]),
        problem=lambda _: problem,
        start=lambda _: None,
        solution=lambda p, _: solution(settings, inputs, p),
    )


def network(settings: Settings, inputs: Inputs) -> Arm:
    """The network's arm: one direction of forward mode through the inner SGD run, which is exact for one unknown."""
    coefficient = Coefficient(size=0, grid=settings.points, parameter=settings.parameter)
    return Arm(
        coefficient=coefficient,
        method=ForwardGradient(directions=1),
        problem=lambda theta: pinn.bilevel(settings, inputs, coefficient, theta),
        start=lambda seed: pinn.weights(settings.pinn, stream(seed, "weights")),
        solution=lambda _, theta: pinn.evaluate(settings.model, theta, inputs.grid_times, settings.points),
    )


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
    coefficient = coefficient_of(settings)
    p, basis = coefficient.guess(settings.model, settings.seeds[0]), torch.from_numpy(waves(settings.field))
    here = problem.solve({"p": p})
    moved = [(problem.solve({"p": p + settings.numerical.probe * wave}) - here).reshape(-1) for wave in basis.T]
    # both blocks in units of the loss's root, so that their rows may stand in one matrix
    seen = torch.stack(moved, dim=1) / (settings.numerical.probe * math.sqrt(here.numel()))
    slopes: Any = torch.autograd.functional.jacobian(coefficient.bends, p)  # type: ignore[no-untyped-call]
    held = math.sqrt(settings.weight / settings.field) * slopes @ basis
    _, sizes, directions = torch.linalg.svd(torch.cat([seen, held]), full_matrices=False)
    # an error of the solver, seen through a difference over `probe`
    weakest, error = float(sizes[-1]), settings.tolerance / settings.numerical.probe
    if weakest <= error:
        wave = (int(directions[-1].abs().argmax()) + 1) // 2
        lost = f"neither observations nor penalty tell the part of ν that waves {wave} times over x from nothing"
        if 2 * wave == settings.points:
            how = ": the equation takes ν half a cell beside the points, where the highest wave of the grid is zero"
        else:
            how = f" (a unit of it moves them by {weakest:.1e}, the solver's own error is {error:.0e})"
        raise UserError(
            "field", got=f"{settings.field} unknowns on a grid of {settings.points} points",
            why=lost + how,
            do="pass a smaller --field, a finer --grid, more times and positions to --observe, or a larger --penalty",
        )  # fmt: skip
    share = seen.T @ seen @ torch.linalg.inv(seen.T @ seen + held.T @ held)
    return Identified(unknowns=settings.field, decided=float(share.diagonal().sum()), weakest=weakest)
