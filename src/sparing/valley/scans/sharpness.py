"""Sharpness: how far a loss can rise within a ball around the weights, plain or scaled by them.

Sources: Foret et al. 2021, "Sharpness-aware minimization for efficiently improving generalization" (arXiv:2010.01412);
Kwon et al. 2021, "ASAM: Adaptive sharpness-aware minimization" (arXiv:2102.11600).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.seeds import stream
from sparing.valley.apply import perturbing
from sparing.valley.scans.curvature import Loss, Mode, loss_and_gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharpness:
    """The highest rise of a loss that was found within a ball."""

    value: float  # in the unit of the loss, ≥ 0; the maximum over the ball is at least this
    first: float  # rise after SAM's own single step, along the gradient
    loss: float  # at the weights
    slope: float  # norm of the gradient there, of the scaled one if adaptive
    radius: float  # ρ: of ‖ε‖, or of ‖ε / |w|‖ if adaptive
    adaptive: bool  # whether steps are relative to each weight
    steps: int  # ascent steps (count)


def sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    radius: float = 0.05,
    adaptive: bool = False,
    steps: int = 20,
    seed: int = 0,
    mode: Mode = "eval",
) -> Sharpness:
    """Search the highest rise of the mean loss over batches within a ball around the weights.

    The first step is SAM's, ρ g / ‖g‖. Each further one goes to the point of the sphere half-way between where it is
    and where the gradient points: on a quadratic a power iteration with a shift, which negative curvature does not
    attract. Where the gradient at the weights is zero, the first step is random. The best point counts.

    Args:
        model: Any module; its parameters, buffers and modes are restored, to the bit.
        loss: Mean loss of one batch.
        batches: At least one.
        radius: ρ, > 0: in the unit of the weights, or relative to them if adaptive.
        adaptive: Whether the ball is ‖ε / |w|‖ ≤ ρ, elementwise; weights that are zero then stay.
        steps: Gradients at other points (count), >= 1; 1 is SAM's estimate.
        seed: Seed of the random first step.
        mode: Statistics of batch norm: "eval" (stored) or "batch", as SAM trains with.

    Returns:
        The rise, with SAM's estimate and the slope.

    Raises:
        UserError: As ``gradient``; if ``radius`` or ``steps`` is out of range, or no weight can move (all zero).

    Example:
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> with torch.no_grad():
        ...     _ = model.weight.zero_()
        >>> curve = torch.tensor([1.0, 4.0], dtype=torch.float64)  # eigenvalues; ρ² · 4 / 2 is the highest rise
        >>> bowl = lambda net, batch: (curve * net.weight**2).sum() / 2
        >>> round(sharpness(model, bowl, [None], radius=0.1).value, 6)
        0.02
    """
    require(0 < radius < math.inf, "radius", radius, "a ball has a size", "pass a number > 0")
    require(steps >= 1, "steps", steps, "the first is SAM's", "pass steps >= 1")
    data = list(batches)
    here, slope = loss_and_gradient(model, loss, data, mode=mode)
    params = named_parameters(model)
    scale = {name: params[name].detach().abs() if adaptive else None for name in slope}
    size = _norm(ascent := _scaled(slope, scale))
    start = ascent if size > 0 else _scaled(_random(slope, seed), scale)
    require(
        _norm(start) > 0, "model", "only zero weights", "an adaptive step moves in proportion", "pass adaptive=False"
    )
    point = _times(start, radius / _norm(start))
    rises: list[float] = []
    with perturbing(model) as perturber:
        for step in range(steps):
            perturber.to(_scaled(point, scale), 1.0)
            # The last point is only looked at, but its gradient comes with the loss
            value, slope = loss_and_gradient(model, loss, data, mode=mode)
            rises.append(value - here)
            ascent = _scaled(slope, scale)
            if step + 1 == steps or not (length := _norm(ascent)):
                break
            between = {name: point[name] / radius + ascent[name] / length for name in point}
            # Exactly downhill: the point is a minimum of the sphere, and any other way leads up
            point = _times(between, radius / _norm(between)) if _norm(between) else _times(ascent, radius / length)
    best = max(0.0, *rises)
    return Sharpness(
        value=best, first=rises[0], loss=here, slope=size, radius=radius, adaptive=adaptive, steps=len(rises)
    )


def _scaled(vector: dict[str, Tensor], scale: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """T · vector, T the sizes of the weights, or one."""
    return {name: value if (by := scale[name]) is None else value * by for name, value in vector.items()}


def _times(vector: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: value * factor for name, value in vector.items()}


def _norm(vector: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in vector.values()))


def _random(like: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Gaussian noise with names, shapes, dtypes and devices of a vector."""
    return {
        name: torch.randn(value.shape, generator=stream(seed, "valley", "sharpness", name)).to(value)
        for name, value in like.items()
    }
