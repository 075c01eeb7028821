"""Draws that follow scores: which blocks have large gradients, and which are cheap to reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.layersample.inclusion import allocate, pivotal, systematic
from sparing.seeds import stream

# how a set of fixed size with given inclusion probabilities is drawn; both are exact
Method = Literal["systematic", "pivotal"]

_DESIGNS = {"systematic": systematic, "pivotal": pivotal}


def design(probabilities: Tensor, method: Method, *, seed: int, name: str, interval: int) -> tuple[int, ...]:
    """Draw a set with the given inclusion probabilities from the stream of (seed, name, interval)."""
    return _DESIGNS[method](probabilities.tolist(), stream(seed, "layersample", name, interval))


def check_design(owner: str, method: str, floor: float) -> None:
    """Refuse a design or a floor that does not exist."""
    if method not in _DESIGNS:
        raise UserError(f"{owner}.method", got=method, why="no such design", do="pass 'systematic' or 'pivotal'")
    if not 0.0 <= floor <= 1.0:
        raise UserError(
            f"{owner}.floor", got=floor, why="it is a share of the uniform probability", do="pass a number in [0, 1]"
        )


def _check_scoring(owner: str, decay: float, signal: str) -> None:
    """Refuse a decay or a signal that does not exist."""
    if not 0.0 <= decay < 1.0:
        raise UserError(f"{owner}.decay", got=decay, why="1 would never learn", do="pass a number in [0, 1)")
    if signal not in {"gradient", "bound"}:
        raise UserError(f"{owner}.signal", got=signal, why="no such signal", do="pass 'gradient' or 'bound'")


def fill_unseen(scores: Tensor | None, count: int) -> Tensor:
    """Finite float64 scores, shape (count,): all equal for None, the largest seen for a block never seen (NaN)."""
    if scores is None:
        return torch.ones(count, dtype=torch.float64)
    values = scores.detach().to("cpu", torch.float64)
    seen = ~values.isnan()
    if values.shape != (count,) or bool((values[seen] < 0).any() | values[seen].isinf().any()):
        raise UserError(
            "scores",
            got=values.tolist(),
            why="a score is a gradient norm",
            do=f"pass {count} finite numbers >= 0 or NaN",
        )
    # optimism: an unseen block looks as good as the best, so each is drawn early
    best = values[seen].max() if bool(seen.any()) else torch.ones((), dtype=torch.float64)
    return torch.where(seen, values, best)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """Softmax of gradient-norm scores, with a floor and exact inclusion probabilities.

    ``π = clip(c·exp(s_l/(τ·mean s)), floor·γ/N, 1)`` with c such that exactly γ blocks are drawn. Scores are divided by
    their mean first, so τ has no unit and means the same for every model.

    Source: MISA (arXiv:2511.00056) and GRASS (arXiv:2604.07808) for the softmax of running norms; the exact inclusion
    is ours.
    """

    temperature: float = 1.0
    """Temperature τ in units of the mean score; large draws uniformly, small greedily."""

    floor: float = 0.1
    """Smallest inclusion probability, as a share of the uniform one γ/N; above 0 every block returns."""

    decay: float = 0.9
    """Weight β of the old score when a new gradient norm is seen, in [0, 1); the owner of the scores applies it."""

    signal: Literal["gradient", "bound"] = "gradient"
    """What feeds the scores: gradient norms of the drawn blocks, or the free bound ‖x‖·‖δ‖ of every block."""

    method: Method = "systematic"
    """Design of the draw."""

    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings without meaning.

        Raises:
            UserError: For a temperature that is not positive, a decay outside [0, 1), or an unknown signal.
        """
        check_design("Adaptive", self.method, self.floor)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UserError(
                "Adaptive.temperature", got=self.temperature, why="scores are divided by it", do="pass a number > 0"
            )
        _check_scoring("Adaptive", self.decay, self.signal)

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        values = fill_unseen(scores, count)
        logits = values / (values.mean().clamp_min(torch.finfo(torch.float64).tiny) * self.temperature)
        # allocate() uses ratios only, so subtracting the maximum is free and keeps exp() from overflowing
        weights = (logits - logits.max()).exp().tolist()
        return torch.tensor(allocate(weights, active, floor=self.floor * active / count), dtype=torch.float64)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        probabilities = self.inclusion(count, active, scores=scores)
        return design(probabilities, self.method, seed=seed, name="Adaptive", interval=interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostAware:
    """Score per cost: with a frozen embedding a block near the head is cheap to train, one near the input is not.

    Training block l of N asks for a backward pass through blocks l … N−1 and one weight gradient. In units of one
    block's forward pass the step costs ``cost_l = forward·N + (N − l) + 1``, and ``π_l`` is in proportion to ``s_l /
    cost_l``. Use with ``embed=False`` only: a trained embedding makes every backward pass full length and every block
    equally expensive.

    Source: ours; the costs are those of the truncated backward pass.
    """

    forward: float = 1.0
    """Weight of the forward pass in the cost; 1 counts time, 0 counts only what the choice changes."""

    floor: float = 0.1
    """Smallest inclusion probability, as a share of the uniform one γ/N; above 0 every block returns."""

    decay: float = 0.9
    """Weight β of the old score when a new gradient norm is seen, in [0, 1); the owner of the scores applies it."""

    signal: Literal["gradient", "bound"] = "gradient"
    """What feeds the scores; the bound reaches only blocks above the lowest active one when the embedding is frozen."""

    method: Method = "systematic"
    """Design of the draw."""

    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings without meaning.

        Raises:
            UserError: For a negative or infinite forward cost, a decay outside [0, 1), or an unknown signal.
        """
        check_design("CostAware", self.method, self.floor)
        if not (self.forward >= 0 and math.isfinite(self.forward)):
            raise UserError(
                "CostAware.forward", got=self.forward, why="a cost is not negative", do="pass a number >= 0"
            )
        _check_scoring("CostAware", self.decay, self.signal)

    def costs(self, count: int) -> Tensor:
        """Cost of a step that trains block l alone, in forward passes of one block, float64, shape (count,)."""
        below = torch.arange(count, dtype=torch.float64)
        return self.forward * count + (count - below) + 1.0

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        weights = (fill_unseen(scores, count) / self.costs(count)).tolist()
        return torch.tensor(allocate(weights, active, floor=self.floor * active / count), dtype=torch.float64)

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        probabilities = self.inclusion(count, active, scores=scores)
        return design(probabilities, self.method, seed=seed, name="CostAware", interval=interval)
