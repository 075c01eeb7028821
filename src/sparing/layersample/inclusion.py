"""Exact inclusion probabilities, and draws of a fixed size that honour them.

``numpy.random.choice(p=..., replace=False)`` draws items one after the other and rescales what is left, so item l does
*not* enter with probability γ·p_l. The two designs below do exactly that: the chance that block l is in the set is the
number given for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

# below this distance from 0 or 1 a probability counts as 0 or 1; far above the rounding of a sum of a thousand terms
_CERTAIN = 1e-12

_NEGLIGIBLE = 1e-200  # weights below this share of the largest count as zero, so that no reciprocal overflows


def allocate(weights: Sequence[float], size: int, *, floor: float = 0.0) -> list[float]:
    """Share ``size`` draws in proportion to weights, none above 1 and none below ``floor``.

    The result is ``π_l = clip(c·w_l, floor, 1)`` with the one constant c for which ``Σ π_l = size``. It maximises ``Σ
    w_l log π_l`` under those bounds. Blocks of weight zero get what they would in the limit of a vanishing equal
    weight: the floor, or an equal share of what is left when every other block is already certain.
    """
    count = len(weights)
    assert 0 <= size <= count, (size, count)
    assert 0.0 <= floor * count <= size + _CERTAIN, (floor, count, size)
    assert all(w >= 0.0 and math.isfinite(w) for w in weights), weights
    if size in {0, count}:
        return [float(size > 0)] * count
    top = max(weights)
    scaled = [w / top if w > _NEGLIGIBLE * top else 0.0 for w in weights]
    positive = sum(w > 0.0 for w in scaled)
    if positive + (count - positive) * floor <= size:
        rest = (size - positive) / max(count - positive, 1)
        return [1.0 if w > 0.0 else rest for w in scaled]
    factor = _factor(scaled, size, floor)
    return [min(max(factor * w, floor), 1.0) for w in scaled]


def _factor(weights: Sequence[float], size: int, floor: float) -> float:
    """Find c with ``Σ clip(c·w, floor, 1) = size``: piecewise linear and rising, so only corners are searched."""
    corners = sorted({bound / w for w in weights if w > 0.0 for bound in (floor, 1.0)})
    low, high = 0, len(corners) - 1
    while high - low > 1:
        middle = (low + high) // 2
        total = math.fsum(min(max(corners[middle] * w, floor), 1.0) for w in weights)
        low, high = (middle, high) if total <= size else (low, middle)
    # between two corners the sum is linear in c, so the last step is exact and not a bisection to a tolerance
    inside = 0.5 * (corners[low] + corners[high])
    free = math.fsum(w for w in weights if floor < inside * w < 1.0)
    bound = math.fsum(1.0 if inside * w >= 1.0 else floor for w in weights if not floor < inside * w < 1.0)
    return (size - bound) / free if free > 0.0 else inside


def uniforms(count: int, generator: torch.Generator) -> list[float]:
    """Take ``count`` numbers of [0, 1) with 53 random bits each; the only way randomness enters a draw."""
    values: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return values


def shuffled(count: int, generator: torch.Generator) -> list[int]:
    """Permute ``range(count)`` by sorting uniform keys."""
    # not torch.randperm: its algorithm may change between releases, and a resumed run must draw the same blocks
    keys = uniforms(count, generator)
    return sorted(range(count), key=keys.__getitem__)


def systematic(probabilities: Sequence[float], generator: torch.Generator) -> tuple[int, ...]:
    """Draw by a comb of unit spacing laid at random over the summed probabilities, in random order.

    Exactly ``Σ π`` blocks are drawn and block l is among them with probability exactly π_l. The random order makes
    (nearly) every pair possible.

    Source: Madow 1949; Hartley and Rao 1962 (the random order).
    """
    certain, undecided = _split_certain(probabilities)
    order = [undecided[i] for i in shuffled(len(undecided), generator)]
    (start,) = uniforms(1, generator)
    size = round(math.fsum(probabilities)) - len(certain)
    edges = [0.0, *accumulate(probabilities[i] for i in order)]
    edges[-1] = float(size)  # the running sum misses the integer by rounding, and the size must be exact
    teeth = [math.ceil(edge - start) for edge in edges]
    drawn = [block for block, (below, above) in zip(order, pairwise(teeth), strict=True) if above > below]
    return tuple(sorted(certain + drawn))


def pivotal(probabilities: Sequence[float], generator: torch.Generator) -> tuple[int, ...]:
    """Draw by duels: two undecided blocks fight until one has probability 0 or 1, and the other goes on.

    Exactly ``Σ π`` blocks are drawn and block l is among them with probability exactly π_l.

    Source: Deville and Tillé 1998, "Unequal probability sampling without replacement through a splitting method".
    """
    drawn, undecided = _split_certain(probabilities)
    order = [undecided[i] for i in shuffled(len(undecided), generator)]
    size = round(math.fsum(probabilities))
    if not order:
        return tuple(sorted(drawn))
    champion, chance = order[0], probabilities[order[0]]
    for block, luck in zip(order[1:], uniforms(len(order) - 1, generator), strict=True):
        other, total = probabilities[block], chance + probabilities[block]
        if total < 1.0:  # one of the two is out, the other carries the sum
            champion, chance = (champion, total) if luck * total < chance else (block, total)
        else:  # one of the two is in, the other carries what exceeds 1
            winner = luck * (2.0 - total) < 1.0 - other
            drawn.append(champion if winner else block)
            champion, chance = (block if winner else champion), total - 1.0
    # the last block's probability is 0 or 1 up to rounding: the size decides which
    return tuple(sorted([*drawn, champion] if len(drawn) < size else drawn))


def _split_certain(probabilities: Sequence[float]) -> tuple[list[int], list[int]]:
    """Split the blocks into those that are certainly drawn and those still open."""
    certain = [i for i, p in enumerate(probabilities) if p >= 1.0 - _CERTAIN]
    return certain, [i for i, p in enumerate(probabilities) if _CERTAIN < p < 1.0 - _CERTAIN]
