"""How many blocks ever train, and how far the backward pass goes: expectations of the draws, mostly exact."""

from __future__ import annotations

import math

from sparing.layersample.draws import Bernoulli, Draw, Fixed, Ordered, Reshuffle, Uniform

_DRAWS = 512  # draws averaged where no closed form is known; the standard error of the lowest index is then below N/45


def coverage(sampler: Draw, count: int, active: int, rounds: int) -> float:
    """Expected share of blocks that were active in at least one of the first rounds.

    ``1 − mean (1 − π_l)^R`` when rounds are independent; ``min(1, R·γ/N)`` for a deal, in order or reshuffled; γ/N for
    a fixed set.
    For a sampler that follows scores, π is that of equal scores.

    Example:
        >>> round(1 - coverage(Uniform(), 32, 2, 10), 3)
        0.524
    """
    if count == 0 or rounds == 0:
        return 0.0
    if isinstance(sampler, Reshuffle | Ordered):
        return min(1.0, rounds * active / count)
    if isinstance(sampler, Fixed):
        return active / count
    missed: float = (1.0 - sampler.inclusion(count, active)).pow(rounds).mean().item()
    return 1.0 - missed


def expected_lowest(count: int, active: int) -> float:
    """Expected lowest index, from 0, of a uniform set of γ out of N: ``(N + 1)/(γ + 1) − 1``.

    With a frozen embedding the backward pass ends there. An empty set gives N: nothing below the tail is reached.

    Example:
        >>> expected_lowest(32, 2)
        10.0
    """
    return (count + 1) / (active + 1) - 1


def lowest_drawn(sampler: Draw, count: int, active: int) -> float:
    """Expected lowest index, from 0, of one draw of any sampler; N stands for an empty draw.

    Exact for uniform, ordered, reshuffled, fixed and Bernoulli draws; the mean of 512 draws for others.
    """
    if isinstance(sampler, Fixed) and sampler.blocks is not None:
        return float(min(sampler.draw(count, active, seed=0, interval=0), default=count))
    if isinstance(sampler, Uniform | Reshuffle | Fixed):
        return expected_lowest(count, active)
    if isinstance(sampler, Bernoulli):
        return math.fsum((1.0 - active / count) ** above for above in range(1, count + 1))
    draws = count if isinstance(sampler, Ordered) else _DRAWS  # the deals of an order repeat after N
    drawn = (sampler.draw(count, active, seed=0, interval=i) for i in range(draws))
    return sum(min(blocks, default=count) for blocks in drawn) / draws


def most_drawn(sampler: Draw, count: int, active: int, *, risk: float = 1e-3) -> int:
    """Bound the size of a draw: γ, or for Bernoulli draws what is exceeded with a chance below ``risk``."""
    if not isinstance(sampler, Bernoulli) or count == 0:
        return active
    share, below = active / count, 0.0
    for blocks in range(count + 1):
        below += math.comb(count, blocks) * share**blocks * (1.0 - share) ** (count - blocks)
        if below > 1.0 - risk:
            return blocks
    return count
