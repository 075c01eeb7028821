"""Masks that change while the model trains: pure updates of one layer, and when they are due.

A step is the index of an optimizer step, from 0; ``steps`` is how many the whole run has. Nothing here touches a live
model: see ``evolve``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparing.errors import require
from sparing.scaling.masks.live import exchange_live, prune_live


@runtime_checkable
class Method(Protocol):
    """How a layer's mask changes; a value."""

    @property
    def dense_gradient(self) -> bool:
        """Whether an update looks at the gradient of masked weights."""

    def due(self, step: int, steps: int) -> bool:
        """Tell whether the mask changes after this step."""

    def fraction(self, step: int, steps: int) -> float:
        """Return the share of live weights that an update after this step exchanges."""

    def density(self, step: int, steps: int) -> float | None:
        """Return the density that a layer has after this step; None leaves it as it is."""

    def update(
        self,
        weight: Tensor,
        mask: Tensor,
        gradient: Tensor | None,
        *,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the next mask of one layer."""


@runtime_checkable
class LiveMethod(Method, Protocol):
    """A method that can also change a sparse layer by its live weights alone; any other makes such a layer dense."""

    def update_live(
        self,
        values: Tensor,
        places: Tensor,
        gradient: Tensor | None,
        *,
        shape: torch.Size,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the places that are live next, as ``update`` chooses them: ascending positions, as ``places`` are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _DropAndGrow:
    """Schedule of the methods that drop and grow the same number of weights."""

    every: int = 100
    """Optimizer steps between updates, ΔT (count)."""
    until: float = 0.75
    """Share of the run after which the mask stays, T_end/steps."""
    share: float = 0.3
    """Share of the live weights that the first update of RigL (α), or every one of SET (ζ), would exchange."""

    def __post_init__(self) -> None:
        """Reject shares that exchange nothing or everything, and schedules that never end or never begin."""
        do = "pass a number between 0 and 1"
        require(0 < self.share < 1, "share", self.share, "some weights go and some stay", do)
        require(self.every >= 1, "every", self.every, "an update needs a step", "pass every >= 1")
        require(0 < self.until <= 1, "until", self.until, "it is a share of the run", "pass a number in (0, 1]")

    def due(self, step: int, steps: int) -> bool:
        """Tell whether the mask changes after this step: at multiples of ``every`` until ``until``, not at step 0."""
        return 0 < step < self.until * steps and step % self.every == 0

    def density(self, step: int, steps: int) -> float | None:
        """Return None: the number of live weights stays."""
        return None

    def update(
        self,
        weight: Tensor,
        mask: Tensor,
        gradient: Tensor | None,
        *,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the next mask of one layer, boolean, with as many live entries; arguments as in ``Method.update``."""
        score = self._growth_score(gradient, weight.shape, generator).to(weight.device)
        return exchange(weight, mask, score, fraction=self.fraction(step, steps))

    def update_live(
        self,
        values: Tensor,
        places: Tensor,
        gradient: Tensor | None,
        *,
        shape: torch.Size,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the next live places of one layer, as many; arguments as in ``LiveMethod.update_live``."""
        score = self._growth_score(gradient, shape, generator)
        return exchange_live(values, places, score, fraction=self.fraction(step, steps))

    def fraction(self, step: int, steps: int) -> float:
        """Return the share of live weights that an update after this step exchanges."""
        raise NotImplementedError

    def _growth_score(self, gradient: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return what is highest where weights grow."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class RigL(_DropAndGrow):
    """Drops the smallest weights and grows where the dense gradient is largest; fewer as the run goes on.

    Source: Evci et al. 2020 (arXiv:1911.11134), equation 1 and algorithm 1; a weight that was dropped may be grown
    again at once, and then has kept its value.
    """

    dense_gradient: ClassVar[bool] = True

    def fraction(self, step: int, steps: int) -> float:
        """Return α/2 · (1 + cos(π t / T_end)).

        Args:
            step: Index of the optimizer step, t.
            steps: Optimizer steps of the whole run (count).

        Returns:
            In [0, α]; 0 from T_end on.
        """
        end = self.until * steps
        return self.share / 2 * (1 + math.cos(math.pi * step / end)) if step < end else 0.0

    def _growth_score(self, gradient: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        assert gradient is not None
        return gradient.abs()


@dataclass(frozen=True, kw_only=True, slots=True)
class SET(_DropAndGrow):
    """Drops the smallest weights and grows at random, an equal share in every update.

    Source: Mocanu et al. 2018 (arXiv:1707.04780), algorithm 1, ζ = 0.3; there an update follows every epoch, and the
    share is taken of positive and negative weights apart.
    """

    dense_gradient: ClassVar[bool] = False

    def fraction(self, step: int, steps: int) -> float:
        """Return ζ at every step."""
        return self.share

    def _growth_score(self, gradient: Tensor | None, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class GMP:
    """Gradual magnitude pruning: density falls along a cubic, and the largest live weights stay, layer by layer.

    Source: Zhu & Gupta 2017 (arXiv:1710.01878), equation 1; the default window is that of Jin et al. 2025
    (arXiv:2501.12486).
    """

    dense_gradient: ClassVar[bool] = False

    final: float
    """Density at the end, in every layer, ρ_f."""
    start: float = 0.25
    """Share of the run before the first weight is pruned."""
    until: float = 0.75
    """Share of the run after which the mask stays."""
    every: int = 100
    """Optimizer steps between updates, Δt (count)."""
    initial: float = 1.0
    """Density before, ρ_i."""

    def __post_init__(self) -> None:
        """Reject densities and windows that do not fall."""
        require(self.every >= 1, "every", self.every, "an update needs a step", "pass every >= 1")
        falls = 0 < self.final <= self.initial <= 1
        shown = f"{self.initial} to {self.final}"
        require(falls, "GMP density", shown, "pruning only removes weights", "pass 0 < final <= initial <= 1")
        window = f"{self.start} to {self.until}"
        do = "pass 0 <= start < until <= 1"
        require(0 <= self.start < self.until <= 1, "GMP window", window, "they are shares of the run", do)

    def due(self, step: int, steps: int) -> bool:
        """Return whether weights are pruned after this step.

        Args:
            step: Index of the optimizer step.
            steps: Optimizer steps of the whole run (count).

        Returns:
            True at ``every`` steps in the window, and at its end, where the final density is reached.
        """
        first, last = self._window(steps)
        return step == last or (first < step < last and (step - first) % self.every == 0)

    def fraction(self, step: int, steps: int) -> float:
        """Return 0: nothing grows."""
        return 0.0

    def density(self, step: int, steps: int) -> float | None:
        """Return ρ_f + (ρ_i − ρ_f)(1 − p)³ with p the share of the window that has passed.

        Args:
            step: Index of the optimizer step.
            steps: Optimizer steps of the whole run (count).

        Returns:
            Between final and initial density.
        """
        first, last = self._window(steps)
        passed = min(1.0, max(0.0, (step - first) / max(1, last - first)))
        return self.final + (self.initial - self.final) * (1 - passed) ** 3

    def update(
        self,
        weight: Tensor,
        mask: Tensor,
        gradient: Tensor | None,
        *,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the next mask of one layer, part of the one it has."""
        density = self.density(step, steps)
        assert density is not None
        return prune(weight, mask, density)

    def update_live(
        self,
        values: Tensor,
        places: Tensor,
        gradient: Tensor | None,
        *,
        shape: torch.Size,
        step: int,
        steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the next live places of one layer, part of those it has."""
        density = self.density(step, steps)
        assert density is not None
        return prune_live(values, places, density, shape.numel())

    def _window(self, steps: int) -> tuple[int, int]:
        return round(self.start * steps), min(steps - 1, round(self.until * steps))


def exchange(weight: Tensor, mask: Tensor, score: Tensor, *, fraction: float) -> Tensor:
    """Drop a fraction of the live weights, the smallest, and grow as many of the highest scores; counts round down."""
    flat = mask.flatten()
    count = int(fraction * int(flat.sum()))
    kept = flat.clone()
    kept[_lowest(weight.abs().flatten(), flat, count)] = False
    # Dropped entries may be grown again at once, as in RigL's algorithm 1: ``~kept`` and not ``~flat``.
    grown = kept.clone()
    grown[_lowest(-score.flatten(), ~kept, count)] = True
    return grown.view_as(mask)


def prune(weight: Tensor, mask: Tensor, density: float) -> Tensor:
    """Keep the largest live weights, ``density`` of all entries (rounded, at least one); none comes back to life."""
    flat = mask.flatten().clone()
    leaving = int(flat.sum()) - max(1, round(density * flat.numel()))
    flat[_lowest(weight.abs().flatten(), flat, max(0, leaving))] = False
    return flat.view_as(mask)


def energy(weight: Tensor, mask: Tensor) -> float:
    """Return Σ W² over the live weights, in double precision."""
    return float(weight.detach().double().square()[mask].sum())


def retained_gaussian(density: float) -> float:
    """Return κ = ρ + 2 t φ(t), the share of the second moment that the largest ρ of a Gaussian's weights keep."""
    # t is the magnitude that a share ρ exceeds; a random mask has κ = ρ.
    require(0 < density <= 1, "density", density, "it is a share of the weights", "pass a number in (0, 1]")
    if density == 1:
        return 1.0
    normal = NormalDist()
    threshold = normal.inv_cdf(1 - density / 2)
    return density + 2 * threshold * normal.pdf(threshold)


def prefill(second: Tensor, kept: Tensor, grown: Tensor, floor: Tensor | None = None) -> Tensor:
    """Return a second moment in which grown weights have the mean of their row's kept ones, at least ``floor``.

    With both moments at zero the first Adam step of a grown weight late in training is (1 − β₁)/√(1 − β₂) rates long:
    3.2 for (0.9, 0.999). With v₀ it is (1 − β₁)|g|/√(β₂v₀ + (1 − β₂)g²), less than (1 − β₁)/√β₂ rates where v₀ ≥ g².
    """
    rows, alive = second.flatten(1), kept.flatten(1)  # rows are neurons
    counts, sums = alive.sum(1), (rows * alive).sum(1)
    layer = sums.sum() / counts.sum().clamp(min=1)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), layer)  # a row without kept weights takes the layer's
    filled = means[:, None].expand_as(rows).reshape(second.shape)
    if floor is not None:
        filled = torch.maximum(filled, floor)
    return torch.where(grown, filled, second)


def _lowest(score: Tensor, among: Tensor, count: int) -> Tensor:
    """Return the flat indices of the ``count`` lowest scores among marked entries; ties go to the lower index."""
    places = among.nonzero().flatten()
    order = torch.sort(score[places], stable=True).indices[:count]
    return places[order]
