"""Why the valley is asymmetric, in two small experiments: one simulated ReLU unit, and the units of a real network.

A unit with weights w = a h + δ has learned a little of its input h. Along sign(w) its pre-activation grows with λ:
active units stay active on the positive side and turn off on the negative one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks.modes import evaluating
from sparing.errors import require
from sparing.seeds import stream
from sparing.valley.apply import perturbing
from sparing.vectors import Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitMove:
    """The pre-activation z(λ) = (w + λ sign(w))ᵀh over draws of δ."""

    step: float  # λ, in units of weight
    mean: float  # mean of z over the draws
    deviation: float  # standard deviation of z over the draws
    active: float  # share of draws with z > 0, which a ReLU lets through
    agreement: float  # share of draws that are active or inactive as they are at λ = 0
    expected: float  # E[z] in closed form, a ‖h‖² + λ Σ_j |h_j| erf(a |h_j| / √2)
    error: float  # standard error of the mean, deviation / √draws: the Monte Carlo error of ``mean``


def expected_shift(inputs: Tensor, slope: float) -> float:
    """Return E[sign(w)ᵀh] = Σ_j |h_j| erf(a |h_j| / √2) for w = a h + δ, δ ~ N(0, 1): the shift per unit of λ.

    E[sign(w_j)] = erf(a h_j / √2) because w_j has mean a h_j and variance 1.
    """
    size = inputs.double().abs()
    return float((size * torch.erf(slope * size / math.sqrt(2))).sum())


def simulate_unit(
    *,
    dimension: int = 100,
    slope: float = 0.1,
    draws: int = 10_000,
    steps: Sequence[float] = (-1.0, -0.5, 0.0, 0.5, 1.0),
    seed: int = 0,
) -> list[UnitMove]:
    """Simulate one ReLU unit (``dimension`` inputs, slope a, draws of δ) moved along the signs of its weights.

    Source: Li et al. 2024, Listing 1.
    """
    require(dimension >= 1 and draws >= 2, "simulation", f"dimension {dimension}, draws {draws}",
            "a deviation needs two draws of one element", "pass dimension >= 1 and draws >= 2")  # fmt: skip
    h = torch.randn(dimension, generator=stream(seed, "valley", "unit", "input"), dtype=torch.float64)
    noise = torch.randn(draws, dimension, generator=stream(seed, "valley", "unit", "noise"), dtype=torch.float64)
    weights = slope * h + noise
    start, shift = weights @ h, torch.where(weights > 0, 1.0, -1.0).double() @ h
    moves = []
    for step in steps:
        z = start + step * shift
        moves.append(
            UnitMove(
                step=step,
                mean=z.mean().item(),
                deviation=z.std().item(),
                active=(z > 0).double().mean().item(),
                agreement=((z > 0) == (start > 0)).double().mean().item(),
                expected=slope * h.square().sum().item() + step * expected_shift(h, slope),
                error=z.std().item() / math.sqrt(draws),
            )
        )
    return moves


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Which units fire before and after a step, as shares of all units over all rows; the four add up to 1."""

    step: float  # λ
    kept: float  # active before and after
    lost: float  # active before, inactive after
    gained: float  # inactive before, active after
    silent: float  # inactive before and after

    @property
    def agreement(self) -> float:
        """Sum of the diagonal, kept + silent: the number in brackets in the paper's Figure 28."""
        return self.kept + self.silent


def activation_confusion(
    model: nn.Module,
    batches: Iterable[Any],
    direction: Vector,
    steps: Sequence[float] = (-1.0, -0.8, -0.6, -0.4, -0.2, 0.2, 0.4, 0.6, 0.8, 1.0),
    *,
    units: type[nn.Module] | tuple[type[nn.Module], ...] = nn.ReLU,
    call: Callable[[nn.Module, Any], object] | None = None,
) -> list[Activations]:
    """Compare which units are active at θ and at θ + λ · direction; one table for each λ.

    A unit is one element of the output of a module of a type in ``units``, active where it is positive. The model runs
    in eval mode with the statistics it has; parameters and modes are restored.

    Source: Li et al. 2024, Figure 28.
    """
    data = list(batches)

    def active() -> Tensor:
        recorded.clear()
        for batch in data:
            if call is not None:
                call(model, batch)
            else:
                model(**batch) if isinstance(batch, dict) else model(batch)
        do = "pass units=(nn.GELU, …), the types the model has, and at least one batch"
        require(bool(recorded), "activation confusion", "no unit", "no module of these types ran", do)
        return torch.cat([one.flatten() for one in recorded])

    tables = []
    with _recording(model, units) as recorded, perturbing(model) as perturber, torch.no_grad():
        before = active()
        for step in steps:
            perturber.to(direction, step)
            after = active()
            cases = (before & after, before & ~after, ~before & after, ~before & ~after)
            kept, lost, gained, silent = (int(case.sum()) / len(before) for case in cases)
            tables.append(Activations(step=step, kept=kept, lost=lost, gained=gained, silent=silent))
    return tables


@contextmanager
def _recording(model: nn.Module, units: type[nn.Module] | tuple[type[nn.Module], ...]) -> Iterator[list[Tensor]]:
    """Record which units are active, in evaluation mode; NaN counts as inactive."""
    recorded: list[Tensor] = []

    def record(module: nn.Module, args: object, output: Tensor) -> None:
        got = f"{type(module).__name__} that returns {type(output).__name__}"
        why, do = "a unit is an element of a tensor", "pass types of activation modules"
        require(isinstance(output, Tensor), "units", got, why, do)
        recorded.append(output > 0)

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, units)]
    try:
        with evaluating(model):
            yield recorded
    finally:
        for hook in hooks:
            hook.remove()
