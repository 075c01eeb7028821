"""A physics-informed network: û(x, t) = (1 − e^(−t)) NN(x, t) + u_0(x), trained to satisfy the equation.

Derivatives along x and t are carried through the layers beside the value, by plain tensor operations, so that the inner
gradient and then the tangent of the whole inner run can be taken through them.

Source: Shen et al. 2024 (arXiv:2406.14095), section 4.3 and table F.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp

from sparing import hypergrad as hg
from sparing.hypergrad.optimizers import SGD
from sparing.jobs.invert.coefficient import Coefficient
from sparing.jobs.invert.equations import Equation, Name
from sparing.jobs.invert.observations import Inputs
from sparing.jobs.invert.settings import Pinn, Settings
from sparing.jobs.invert.spectral import Array, points

Weights = Mapping[str, Tensor]
Function = Callable[[Tensor], Tensor]

INITIAL: dict[Name, Function] = {
    "burgers": lambda x: -torch.sin(torch.pi * x),
    "allen-cahn": lambda x: x * x * torch.cos(torch.pi * x),
    "kdv": lambda x: torch.cos(torch.pi * x),
}


def weights(shape: Pinn, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh float64 weights from (x, t) to a number: Glorot normal matrices, zero biases."""
    sizes = [2, *[shape.width] * (shape.depth - 1), 1]
    found: dict[str, Tensor] = {}
    for layer, (before, after) in enumerate(itertools.pairwise(sizes)):
        matrix = torch.randn(after, before, generator=generator, dtype=torch.float64)
        found[f"weight{layer}"] = matrix * (2 / (before + after)) ** 0.5
        found[f"bias{layer}"] = torch.zeros(after, dtype=torch.float64)
    return found


def predict(equation: Equation, theta: Weights, x: Tensor, t: Tensor) -> Tensor:
    """û (n,) at positions and times (n,), which equals u_0 at t = 0 whatever the weights."""
    value, last = torch.stack([x, t], dim=-1), len(theta) // 2 - 1
    for layer in range(last + 1):
        value = value @ theta[f"weight{layer}"].T + theta[f"bias{layer}"]
        value = torch.tanh(value) if layer < last else value
    # the factor is 0 at t = 0, so the initial condition needs no term in the loss
    return (1 - torch.exp(-t)) * value.squeeze(-1) + INITIAL[equation.name](x)


def slopes(function: Function, x: Tensor, order: int) -> tuple[Tensor, ...]:
    """An elementwise function of x (n,) and its derivatives: order + 1 tensors (n,).

    Example:
        >>> [round(v.item(), 3) for v in slopes(torch.exp, torch.zeros(1), 3)]
        [1.0, 1.0, 1.0, 1.0]
    """
    if not order:
        return (function(x),)

    def below(at: Tensor) -> tuple[Tensor, ...]:
        return slopes(function, at, order - 1)

    values, tangents = jvp(below, (x,), (torch.ones_like(x),))  # type: ignore[misc]  # without has_aux it is a pair
    return (*values, tangents[-1])


def through_tanh(streams: list[Tensor]) -> list[Tensor]:
    """Return tanh of a layer's a, a_t, a_x, a_xx and, where wanted, a_xxx (Faà di Bruno's formula)."""
    a, by_t, *by_x = streams
    y = torch.tanh(a)
    one = 1 - y * y
    two = -2 * y * one
    found = [y, one * by_t, one * by_x[0], two * by_x[0] ** 2 + one * by_x[1]]
    if len(by_x) == 3:
        three = -2 * (one * one + y * two)
        found.append(three * by_x[0] ** 3 + 3 * two * by_x[0] * by_x[1] + one * by_x[2])
    return found


def derivatives(equation: Equation, theta: Weights, x: Tensor, t: Tensor) -> list[Tensor]:
    """û, û_t, û_x, û_xx and, where dispersive, û_xxx, each (n,), carried through the layers by the chain rule."""
    order, last = (3 if equation.dispersive else 2), len(theta) // 2 - 1
    none, one = torch.zeros_like(x), torch.ones_like(x)
    # value, ∂t, ∂x, ∂xx … of the input (x, t); no nested transforms, which the tangent of the whole run would multiply
    streams = [torch.stack(pair, dim=-1) for pair in ((x, t), (none, one), (one, none), *[(none, none)] * (order - 1))]
    for layer in range(last + 1):
        streams = list((torch.stack(streams) @ theta[f"weight{layer}"].T).unbind(0))
        # a constant has no derivatives, so the bias enters the value alone
        streams[0] = streams[0] + theta[f"bias{layer}"]
        streams = through_tanh(streams) if layer < last else streams
    net, by_t, *by_x = (stream.squeeze(-1) for stream in streams)
    start, rise = slopes(INITIAL[equation.name], x, order), 1 - torch.exp(-t)
    along_x = [rise * own + given for own, given in zip(by_x, start[1:], strict=True)]
    return [rise * net + start[0], rise * by_t + torch.exp(-t) * net, *along_x]


def residual(equation: Equation, theta: Weights, nu: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """What the equation is off by, (n,): û_t + û û_x − ν û_xx − reaction, or + ν û_xxx for KdV."""
    u, value, *along_x = derivatives(equation, theta, x, t)
    if equation.advects:
        value = value + u * along_x[0]
    if equation.reacts:
        value = value - 5 * (u - u**3)
    return value + nu * along_x[2] if equation.dispersive else value - nu * along_x[1]


def edges(equation: Equation, theta: Weights, t: Tensor) -> Tensor:
    """Mean squared breach of u(−1, t) = u(1, t), and for Burgers and Allen–Cahn of their value u_0(±1) there."""
    left, right = (predict(equation, theta, torch.full_like(t, side), t) for side in (-1.0, 1.0))
    if equation.dispersive:
        return (left - right).square().mean()
    held = INITIAL[equation.name](torch.ones_like(t))
    return (left - held).square().mean() + (right - held).square().mean()


def bilevel(settings: Settings, inputs: Inputs, coefficient: Coefficient, theta: Weights) -> hg.Bilevel:
    """Inner: satisfy the equation with ν(φ) at a fresh batch of points (x, t) a step; outer: fit the observations."""
    equation, shape = settings.model, settings.pinn
    times, where = torch.from_numpy(inputs.times), torch.from_numpy(inputs.where)
    t, x = (grid.reshape(-1) for grid in torch.meshgrid(times, where, indexing="ij"))
    seen = inputs.values.reshape(-1)

    def inner(theta: Weights, phi: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        nu = coefficient.value(phi["p"])
        off = residual(equation, theta, nu, batch[0], batch[1]).square().mean()
        return off + edges(equation, theta, batch[1])

    def outer(theta: Weights, _: Mapping[str, Tensor]) -> Tensor:
        return (predict(equation, theta, x, t) - seen).square().mean()

    def batch(_: int, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(2, shape.batch, generator=generator, dtype=torch.float64)
        return torch.stack([2 * drawn[0] - 1, drawn[1]])

    return hg.Bilevel(
        inner=inner,
        outer=outer,
        init=dict(theta),
        optimizer=SGD(lr=shape.lr, clip=shape.clip),
        steps=shape.steps,
        batches=batch,
    )


def evaluate(equation: Equation, theta: Weights, times: Array, grid: int) -> Array:
    """û on a grid, (m, grid), at times (m,)."""
    where = torch.from_numpy(points(grid))
    with torch.no_grad():
        rows = [predict(equation, theta, where, torch.full_like(where, float(t))).numpy() for t in times]
    return np.stack(rows)
