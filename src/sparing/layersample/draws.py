"""Which blocks train in interval i: a pure function of the seed, the interval and, for some, of scores.

No draw reads the global generator or remembers the last one, so every rank and every resumed run sees the same sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.layersample.adaptive import Adaptive, CostAware, Method, check_design, design
from sparing.layersample.inclusion import allocate, shuffled, uniforms
from sparing.seeds import stream

__all__ = ["Adaptive", "Bernoulli", "CostAware", "Draw", "Fixed", "Reshuffle", "Uniform", "Weighted"]


@runtime_checkable
class Draw(Protocol):
    """A rule that picks the active blocks of an interval. Any frozen value with these two methods is one."""

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Pick blocks of ``range(count)`` for one interval; sorted, distinct, and the same for the same arguments."""
        ...

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be in one draw, float64, shape (count,)."""
        ...


def _uniform(count: int, active: int) -> Tensor:
    return torch.full((count,), active / count if count else 0.0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Exactly γ of N blocks, uniformly, without replacement; intervals are independent.

    Example:
        >>> Uniform().draw(8, 2, seed=0, interval=0) == Uniform().draw(8, 2, seed=0, interval=0)
        True

    Source: Pan et al. 2024, Algorithm 1 of the camera-ready (arXiv:2403.17919).
    """

    needs_scores: ClassVar[bool] = False

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Every block: γ/N; float64, shape (count,)."""
        return _uniform(count, active)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        return tuple(sorted(shuffled(count, stream(seed, "layersample", "Uniform", interval))[:active]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshuffle:
    """A fresh random order of all blocks, dealt γ at a time: every block trains in every epoch of ⌈N/γ⌉ intervals.

    When γ does not divide N, the last deal of an epoch wraps round to the start of the same order. So every draw has
    exactly γ distinct blocks, every block comes once or twice an epoch, and each single draw still holds each block
    with probability γ/N. Any 2⌈N/γ⌉ − 1 intervals in a row hold every block.

    Source: random reshuffling as in BAdam (arXiv:2404.02827) and OMGD (arXiv:2603.05960); the wrap rule is ours.
    """

    needs_scores: ClassVar[bool] = False

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Every block: γ/N; float64, shape (count,)."""
        return _uniform(count, active)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        if active == 0:
            return ()
        # the wrap takes from the start of the same order, never of the next: a draw must hold distinct blocks
        epoch, deal = divmod(interval, math.ceil(count / active))
        order = shuffled(count, stream(seed, "layersample", "Reshuffle", epoch))
        return tuple(sorted(order[(deal * active + i) % count] for i in range(active)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """The same blocks in every interval: those given, or one random set ("LISA-fix" of the paper's ablation).

    Source: Pan et al. 2024, Table 12 (arXiv:2403.17919).
    """

    blocks: tuple[int, ...] | None = None
    """Indices of body blocks, from 0; None draws γ of them once, from the seed."""

    needs_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Keep the indices as a sorted tuple.

        Raises:
            UserError: If an index is negative or given twice.
        """
        if self.blocks is None:
            return
        blocks = tuple(sorted(int(block) for block in self.blocks))
        if len(set(blocks)) != len(blocks) or any(block < 0 for block in blocks):
            raise UserError(
                "Fixed.blocks", got=self.blocks, why="each block counts once, from 0", do="pass distinct indices >= 0"
            )
        object.__setattr__(self, "blocks", blocks)  # frozen: this is the dataclass's own way to normalize a field

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """1 for the given blocks and 0 for others; γ/N over seeds when the set is random. Float64, shape (count,)."""
        if self.blocks is None:
            return _uniform(count, active)
        probabilities = torch.zeros(count, dtype=torch.float64)
        probabilities[list(self._given(count, active))] = 1.0
        return probabilities

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Return the fixed set; sorted."""
        if self.blocks is not None:
            return self._given(count, active)
        return tuple(sorted(shuffled(count, stream(seed, "layersample", "Fixed"))[:active]))

    def _given(self, count: int, active: int) -> tuple[int, ...]:
        blocks = self.blocks or ()
        if len(blocks) != active:
            raise UserError(
                "Fixed.blocks", got=f"{len(blocks)} blocks", why=f"active is {active}", do=f"pass active={len(blocks)}"
            )
        if blocks and blocks[-1] >= count:
            raise UserError(
                "Fixed.blocks",
                got=blocks[-1],
                why=f"the model has {count} body blocks",
                do=f"pass indices below {count}",
            )
        return blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Bernoulli:
    """Each block by an independent coin of probability γ/N: γ blocks on average, and no bound on memory.

    Source: Pan et al. 2024, Algorithm 1 of the first version (arXiv:2403.17919v1).
    """

    needs_scores: ClassVar[bool] = False

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Every block: γ/N; float64, shape (count,)."""
        return _uniform(count, active)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw each block independently; sorted."""
        coins = uniforms(count, stream(seed, "layersample", "Bernoulli", interval))
        return tuple(block for block, coin in enumerate(coins) if coin * count < active)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """Chances in proportion to weights: ``π_l = clip(c·w_l, floor·γ/N, 1)`` with Σ π = γ, and exactly γ blocks a draw.

    Source: the weighting is that of OwLore (arXiv:2405.18380); exact inclusion by systematic or pivotal sampling is
    ours.
    """

    weights: tuple[float, ...]
    """One weight per body block, >= 0; only ratios matter."""

    floor: float = 0.1
    """Smallest inclusion probability, as a share of the uniform one γ/N; above 0 every block returns."""

    method: Method = "systematic"
    """Design of the draw."""

    needs_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Keep the weights as a tuple of floats.

        Raises:
            UserError: If a weight is negative or not finite.
        """
        check_design("Weighted", self.method, self.floor)
        weights = tuple(float(weight) for weight in self.weights)
        if not weights or any(w < 0 or not math.isfinite(w) for w in weights):
            raise UserError(
                "Weighted.weights", got=self.weights, why="chances are in proportion to them", do="pass numbers >= 0"
            )
        object.__setattr__(self, "weights", weights)

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        if len(self.weights) != count:
            raise UserError(
                "Weighted.weights",
                got=f"{len(self.weights)} weights",
                why=f"the model has {count} body blocks",
                do="give one to each",
            )
        return torch.tensor(allocate(self.weights, active, floor=self.floor * active / count), dtype=torch.float64)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        probabilities = self.inclusion(count, active, scores=scores)
        return design(probabilities, self.method, seed=seed, name="Weighted", interval=interval)
