"""A draw that fills a budget of parameters, unit after unit, by the size of their gradients: MISA's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.layersample.draws import fill_unseen
from sparing.layersample.inclusion import uniforms
from sparing.seeds import stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """Draws units one after the other by importance; each is kept if it still fits in ``LayerSampling.budget``.

    The next unit is b with chance ``p_b = exp(η·G_b)/Σ exp(η·G)`` over the units not considered yet, the solution of
    ``max_p Σ p_b·G_b − KL(p ‖ uniform)/η``. After each interval ``G_b ← β·G_b + (1 − β)·mean_t ‖g_b,t‖²/n_b`` for the
    units that trained (n_b parameters each); the others keep theirs, and all begin at 0.

    Inclusion probabilities are not known: they depend on sizes and order, and have no closed form.

    Source: MISA (arXiv:2511.00056), Algorithm 1. How the norms are scaled is left open there; the released code does
    not scale them, takes the mean of norms and squares it, visits every module for one step first, and then always
    takes the two that waited longest.
    """

    eta: float = 1.0
    """Weight of importance against evenness, η, in units of 1/G; 0 draws evenly. The paper: 1 to fine-tune, 500 to
    pre-train."""

    decay: float = 0.8
    """Weight β of the old importance when a unit trained, in [0, 1); 0.8 is the released code's."""

    scaled: bool = True
    """Divide squared norms by the unit's parameters (count), so that large and small units compare."""

    limit: float = 5.0
    """Largest exponent η·G, so that no unit has more than e^limit times the chance of another; the released code's."""

    needs_scores: ClassVar[bool] = True
    fills_budget: ClassVar[bool] = True
    squares: ClassVar[bool] = True  # scores are means of squared norms
    start: ClassVar[float] = 0.0  # score of a unit that never trained

    def __post_init__(self) -> None:
        """Refuse settings without meaning.

        Raises:
            UserError: For a negative or infinite weight or limit, or a decay outside [0, 1).
        """
        for name in ("eta", "limit"):
            value = getattr(self, name)
            require(
                value >= 0 and math.isfinite(value), f"Importance.{name}", value, "it is a factor", "pass 0 or more"
            )
        require(
            0.0 <= self.decay < 1.0, "Importance.decay", self.decay, "1 would never learn", "pass a number in [0, 1)"
        )

    def chances(self, count: int, *, scores: Tensor | None = None) -> Tensor:
        """Chance of each unit to be considered first, float64, shape (count,)."""
        zeros = torch.zeros(count, dtype=torch.float64)
        exponents = (self.eta * fill_unseen(scores, count) if scores is not None else zeros).clamp(max=self.limit)
        return exponents.softmax(0)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None,
        shares: Sequence[float] = (), budget: float = 1.0,
    ) -> tuple[int, ...]:  # fmt: skip
        """Draw units until no other fits; sorted.

        Args:
            count: Units of the model.
            active: Not used.
            seed: Seed of the run.
            interval: Index of the interval.
            scores: Importance of each unit, shape (count,); None is equal.
            shares: Part of the model's parameters that each unit is.
            budget: Largest sum of shares, δ.

        Returns:
            Sorted indices of the units that train.

        Raises:
            UserError: Without shares.
        """
        require(len(shares) == count, "Importance", f"{len(shares)} shares", f"there are {count} units", "give all")
        lucks = uniforms(count, stream(seed, "layersample", "Importance", interval))
        chances = self.chances(count, scores=scores).tolist()
        # drawing by weights without replacement is sorting by -log(u)/w (Efraimidis and Spirakis 2006)
        keys = [-math.log1p(-luck) / chance for luck, chance in zip(lucks, chances, strict=True)]
        taken: list[int] = []
        for unit in sorted(range(count), key=keys.__getitem__):
            # fsum: the sum must not depend on the order, or a unit that fits exactly would at times be refused
            if math.fsum(shares[i] for i in [*taken, unit]) <= budget:
                taken.append(unit)
        return tuple(sorted(taken))

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Refuse: these probabilities have no closed form."""
        raise UserError(
            "Importance.inclusion", got=f"{count} units", why="how many fit depends on which came first",
            do="count draws, or ask chances() for the first unit",
        )  # fmt: skip
