"""The two ways from ν to a solution: a numerical solver as a black box, and a network trained in an unrolled loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.hypergrad.directions import Hadamard, Law, Orthonormal, Rademacher
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.jobs.invert import pinn
from sparing.jobs.invert.coefficient import Coefficient
from sparing.jobs.invert.observations import Inputs
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.solver import solve
from sparing.jobs.invert.spectral import Array, interpolation
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


def black_box(settings: Settings, inputs: Inputs) -> hg.BlackBox:
    """The inverse problem around the solver: φ = {"p"}, u = the solution where it was observed.

    Loss: mean (u − seen)² + penalty · roughness; the second part enters exactly, through φ.
    """
    coefficient = Coefficient(size=settings.field, grid=settings.points, parameter=settings.parameter)
    sampling = interpolation(settings.points, inputs.where).T

    def run(phi: Phi) -> Tensor:
        # detached: nobody differentiates the solver, only the loss around it
        nu = coefficient.value(phi["p"].detach()).numpy()
        u = solve(settings.model, nu, inputs.times, grid=settings.points, tolerance=settings.tolerance)
        return torch.from_numpy(u @ sampling)

    def loss(u: Tensor, phi: Phi) -> Tensor:
        misfit = (u - inputs.values).square().mean()
        return misfit + settings.penalty * coefficient.roughness(phi["p"]) if settings.field else misfit

    return hg.BlackBox(solve=run, outer=loss)


def numerical(settings: Settings, inputs: Inputs) -> Arm:
    """The solver's arm: central differences along random directions, exact outer part."""
    problem = black_box(settings, inputs)
    coefficient = Coefficient(size=settings.field, grid=settings.points, parameter=settings.parameter)

    def solution(p: Tensor, _: Any) -> Array:
        nu = coefficient.value(p).numpy()
        return solve(settings.model, nu, inputs.grid_times, grid=settings.points, tolerance=settings.tolerance)

    return Arm(
        coefficient=coefficient,
        method=ZerothOrder(directions=settings.drawn, step=settings.probe, law=LAWS[settings.law]),
        problem=lambda _: problem,
        start=lambda _: None,
        solution=solution,
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
