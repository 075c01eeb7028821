"""Which blocks train in interval i: a pure function of the seed, the interval and, for some, of scores.

No draw reads the global generator or remembers the last one, so every rank and every resumed run sees the same sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.layersample.inclusion import allocate, pivotal, shuffled, systematic, uniforms
from sparing.seeds import stream

__all__ = ["Adaptive", "Bernoulli", "CostAware", "Draw", "Fixed", "Ordered", "Reshuffle", "Uniform", "Weighted"]

# how a set of fixed size with given inclusion probabilities is drawn; both are exact
Method = Literal["systematic", "pivotal"]
_DESIGNS = {"systematic": systematic, "pivotal": pivotal}


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


class _Even:
    """Draws in which every block has the same chance."""

    __slots__ = ()
    needs_scores: ClassVar[bool] = False

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Every block: γ/N; float64, shape (count,)."""
        return torch.full((count,), active / count if count else 0.0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform(_Even):
    """Exactly γ of N blocks, uniformly, without replacement; intervals are independent.

    Example:
        >>> Uniform().draw(8, 2, seed=0, interval=0) == Uniform().draw(8, 2, seed=0, interval=0)
        True

    Source: Pan et al. 2024, Algorithm 1 of the camera-ready (arXiv:2403.17919).
    """

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        return tuple(sorted(shuffled(count, stream(seed, "layersample", "Uniform", interval))[:active]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshuffle(_Even):
    """A fresh random order of all blocks, γ at a time: every block trains in every epoch of ⌈N/γ⌉ intervals.

    When γ does not divide N, the last draw of an epoch wraps round to the start of the same order. So every draw has
    exactly γ distinct blocks, every block comes once or twice an epoch, and each single draw still holds each block
    with probability γ/N. Any 2⌈N/γ⌉ − 1 intervals in a row hold every block.

    Source: random reshuffling as in BAdam (arXiv:2404.02827) and OMGD (arXiv:2603.05960); the wrap rule is ours.
    """

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
class Bernoulli(_Even):
    """Each block independently with probability γ/N: γ blocks on average, and no bound on memory.

    Source: Pan et al. 2024, Algorithm 1 of the first version (arXiv:2403.17919v1).
    """

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw each block independently; sorted."""
        coins = uniforms(count, stream(seed, "layersample", "Bernoulli", interval))
        # coin·N < γ and not coin < γ/N: the quotient is rounded, and γ = N must take every block
        return tuple(block for block, coin in enumerate(coins) if coin * count < active)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed(_Even):
    """The same blocks in every interval: those given, the last, or one random set ("LISA-fix" of the paper's ablation).

    The last blocks are the control for every other draw: better than all in one study, worse than all in another
    (docs/results/layers.md).

    Example:
        >>> Fixed(blocks="last").draw(8, 3, seed=0, interval=5)
        (5, 6, 7)

    Source: Pan et al. 2024, Table 12 (arXiv:2403.17919); fine-tuning the top of a network is as old as fine-tuning.
    """

    blocks: tuple[int, ...] | Literal["last"] | None = None
    """Indices of body blocks, from 0; "last", the γ next to the head; None draws γ of them once, from the seed."""

    def __post_init__(self) -> None:
        """Keep the indices as a sorted tuple.

        Raises:
            UserError: If an index is negative or given twice.
        """
        if self.blocks is None or self.blocks == "last":
            return
        known = not isinstance(self.blocks, str)
        require(known, "Fixed.blocks", self.blocks, "no such set", "pass indices, 'last' or None")
        blocks = tuple(sorted(int(block) for block in self.blocks))
        if len(set(blocks)) != len(blocks) or any(block < 0 for block in blocks):
            raise UserError(
                "Fixed.blocks", got=self.blocks, why="each block counts once, from 0", do="pass distinct indices >= 0"
            )
        object.__setattr__(self, "blocks", blocks)  # frozen: this is the dataclass's own way to normalize a field

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """1 for those blocks and 0 for others; γ/N over seeds when the set is random. Float64, shape (count,)."""
        if self.blocks is None:
            return _Even.inclusion(self, count, active)
        probabilities = torch.zeros(count, dtype=torch.float64)
        probabilities[list(self.draw(count, active, seed=0, interval=0))] = 1.0
        return probabilities

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Return the fixed set, sorted; a given set must have ``active`` blocks of the model."""
        blocks = self.blocks
        if blocks is None:
            return tuple(sorted(shuffled(count, stream(seed, "layersample", "Fixed"))[:active]))
        if blocks == "last":
            return tuple(range(count - active, count))
        if len(blocks) != active:
            raise UserError(
                "Fixed.blocks", got=f"{len(blocks)} blocks", why=f"active is {active}", do=f"pass active={len(blocks)}"
            )
        if blocks and blocks[-1] >= count:
            why = f"the model has {count} body blocks"
            raise UserError("Fixed.blocks", got=blocks[-1], why=why, do=f"pass indices below {count}")
        return blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordered(_Even):
    """Blocks in the order of the model, γ at a time, round and round.

    The last draw of a round continues into the next one, so every block trains in every ⌈N/γ⌉ intervals in a row.

    Example:
        >>> [Ordered().draw(4, 1, seed=0, interval=i) for i in range(5)]
        [(0,), (1,), (2,), (3,), (0,)]

    Source: the cyclic orders of BAdam (arXiv:2404.02827), where γ is 1.
    """

    descending: bool = False
    """From the last block down, instead of from the first block up."""

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw the next ``active`` of ``count`` blocks; sorted."""
        places = ((interval * active + i) % count for i in range(active))
        return tuple(sorted(count - 1 - place if self.descending else place for place in places))


class _Unequal:
    """Draws of exactly γ blocks with the chances that ``inclusion`` gives."""

    __slots__ = ()
    method: Method
    floor: float

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """Draw exactly ``active`` of ``count`` blocks; sorted."""
        probabilities = self.inclusion(count, active, scores=scores).tolist()
        return _DESIGNS[self.method](probabilities, stream(seed, "layersample", type(self).__name__, interval))

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        raise NotImplementedError

    def _allocate(self, weights: list[float], active: int) -> Tensor:
        return torch.tensor(allocate(weights, active, floor=self.floor * active / len(weights)), dtype=torch.float64)

    def _check(self) -> None:
        """Refuse a design, a floor, a decay or a signal that does not exist."""
        name, signal = type(self).__name__, getattr(self, "signal", "gradient")
        require(
            self.method in _DESIGNS, f"{name}.method", self.method, "no such design", "pass 'systematic' or 'pivotal'"
        )
        share = "it is a share of the uniform probability"
        require(0.0 <= self.floor <= 1.0, f"{name}.floor", self.floor, share, "pass a number in [0, 1]")
        decay = getattr(self, "decay", 0.0)
        require(0.0 <= decay < 1.0, f"{name}.decay", decay, "1 would never learn", "pass a number in [0, 1)")
        known = signal in {"gradient", "bound"}
        require(known, f"{name}.signal", signal, "no such signal", "pass 'gradient' or 'bound'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted(_Unequal):
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
        self._check()
        weights = tuple(float(weight) for weight in self.weights)
        if not weights or any(w < 0 or not math.isfinite(w) for w in weights):
            raise UserError(
                "Weighted.weights", got=self.weights, why="chances are in proportion to them", do="pass numbers >= 0"
            )
        object.__setattr__(self, "weights", weights)

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        got, why = f"{len(self.weights)} weights", f"the model has {count} body blocks"
        require(len(self.weights) == count, "Weighted.weights", got, why, "give one to each")
        return self._allocate(list(self.weights), active)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive(_Unequal):
    """Softmax of gradient-norm scores, with a floor and exact inclusion probabilities.

    ``π = clip(c·exp(s_l/(τ·mean s)), floor·γ/N, 1)`` with c such that exactly γ blocks are drawn. Scores are divided by
    their mean first, so τ has no unit and means the same for every model; not so with ``relative=False``.

    Source: MISA (arXiv:2511.00056) and GRASS (arXiv:2604.07808) for the softmax of running norms; the exact inclusion
    is ours.
    """

    temperature: float = 1.0
    """Temperature τ in units of the mean score; large draws uniformly, small greedily."""

    relative: bool = True
    """Divide scores by their mean; False takes τ in units of a gradient element, as the papers write it."""

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
        self._check()
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UserError(
                "Adaptive.temperature", got=self.temperature, why="scores are divided by it", do="pass a number > 0"
            )

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        values = fill_unseen(scores, count)
        unit = values.mean().clamp_min(torch.finfo(torch.float64).tiny) if self.relative else 1.0
        logits = values / (unit * self.temperature)
        # allocate() uses ratios only, so subtracting the maximum is free and keeps exp() from overflowing
        return self._allocate((logits - logits.max()).exp().tolist(), active)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostAware(_Unequal):
    """Score per cost: with a frozen embedding a block near the head is cheap to train, one near the input is not.

    Training block l of N needs a backward pass through blocks l … N−1 and one weight gradient. In units of one block's
    forward pass the step costs ``cost_l = forward·N + (N − l) + 1``, and ``π_l`` is in proportion to ``s_l / cost_l``.
    Use with ``embed=False`` only: a trained embedding makes every backward pass full length and every block equally
    expensive.

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
        self._check()
        if not (self.forward >= 0 and math.isfinite(self.forward)):
            raise UserError(
                "CostAware.forward", got=self.forward, why="a cost is not negative", do="pass a number >= 0"
            )

    def costs(self, count: int) -> Tensor:
        """Cost of a step that trains block l alone, in forward passes of one block, float64, shape (count,)."""
        below = torch.arange(count, dtype=torch.float64)
        return self.forward * count + (count - below) + 1.0

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Probability of each block to be drawn, float64, shape (count,)."""
        return self._allocate((fill_unseen(scores, count) / self.costs(count)).tolist(), active)


def fill_unseen(scores: Tensor | None, count: int) -> Tensor:
    """Finite float64 scores, shape (count,): all equal for None, the largest seen for a block never seen (NaN)."""
    if scores is None:
        return torch.ones(count, dtype=torch.float64)
    values = scores.detach().to("cpu", torch.float64)
    seen = ~values.isnan()
    if values.shape != (count,) or bool((values[seen] < 0).any() | values[seen].isinf().any()):
        do = f"pass {count} finite numbers >= 0 or NaN"
        raise UserError("scores", got=values.tolist(), why="a score is a gradient norm", do=do)
    # optimism: an unseen block looks as good as the best, so each is drawn early
    best = values[seen].max() if bool(seen.any()) else torch.ones((), dtype=torch.float64)
    return torch.where(seen, values, best)
