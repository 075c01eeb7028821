"""How far the signs of two models agree, and how far they would by chance.

Li et al. 2024 (arXiv:2405.12489, §5) compare models by the share of weights of equal sign, which tracks the gap of
their average. That share alone misleads: half of all signs agree between unrelated models, and the scales of norm
layers, all positive, always agree. So it is reported beside its chance level and corrected for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.compatible import Model, vectors_of
from sparing.vectors import Vector, axpy

# How parameters are grouped: one by one, by the block in their name, or by what a mapping or function says
By = Literal["tensor", "block"] | Mapping[str, str] | Callable[[str], str]

# The sign of an exact zero: none, so that the pair does not count, or −1 as in §1 of the paper
Zero = Literal["abstain", "minus"]

_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Shares of equal signs, from 0 to 1; NaN where no pair of elements votes."""

    element: float  # share of elements that agree, among those where both vote; SSR. The largest layers decide it.
    tensor: float  # mean over tensors of their shares: all layers count the same
    # share weighted by |a| + |b|: 1 − Σ|a − b| / Σ(|a| + |b|) over flips, so that flips of tiny weights count little
    weighted: float
    chance: float  # expected ``element`` if the elements of every tensor were permuted at random
    # (element − chance) / (1 − chance): 0 for unrelated models, 1 for equal signs; NaN where chance is 1
    corrected: float
    zeros: float  # share of elements left out because either is exactly zero
    votes: int  # elements compared (count)
    # the same for each group, where groups were asked for
    groups: Mapping[str, Agreement] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Standard error of ``corrected`` for unrelated models, √(chance / ((1 − chance) · votes)).

        It takes elements as independent, so it is a lower bound.
        """
        if not self.votes or not self.chance < 1:
            return math.nan
        return math.sqrt(self.chance / ((1 - self.chance) * self.votes))


@dataclass(frozen=True, slots=True)
class _Count:
    """Sums over one pair of tensors."""

    agree: float
    votes: float
    expected: float  # votes · chance
    agree_weight: float
    vote_weight: float
    elements: int


def sign_agreement(
    a: Model, b: Model, *, by: By | None = None, base: Model | None = None, zero: Zero = "abstain"
) -> Agreement:
    """Compare the signs of two models, or of what two fine-tunings changed.

    An exact zero does not count: a masked or never-trained weight says nothing. The paper's sign(0) = −1 is an option.

    Args:
        a: A model, its state or a vector.
        b: Another of the same architecture.
        by: Groups to tell apart; a block is named by the part of a parameter's name up to its first number.
        base: The common ancestor; if given, the task vectors ``a − base`` and ``b − base`` are compared.
        zero: What the sign of an exact zero is.

    Returns:
        The shares over all parameters, with those of the groups.

    Raises:
        UserError: If the models differ in names or shapes, or hold values that are not finite.

    Example:
        >>> a = {"w": torch.tensor([1.0, -1.0, 0.0, 2.0])}
        >>> b = {"w": torch.tensor([3.0, 1.0, -5.0, 0.5])}
        >>> found = sign_agreement(a, b)  # three pairs vote, two agree; ⅔ · ¾ + ⅓ · ¼ by chance
        >>> round(found.element, 3), round(found.chance, 3), found.zeros
        (0.667, 0.583, 0.25)

    Source: Li et al. 2024, §5 (SSR); the chance level is ours (see ``chance_level``).
    """
    require(zero in {"abstain", "minus"}, "zero", repr(zero), "a zero abstains or counts as minus", "name one of them")
    first, second, *ancestor = vectors_of(a, b, *([] if base is None else [base]))
    if ancestor:
        first, second = axpy(-1.0, ancestor[0], first), axpy(-1.0, ancestor[0], second)
    return compare_signs(first, second, by=by, zero=zero)


def compare_signs(a: Vector, b: Vector, *, by: By | None = None, zero: Zero = "abstain") -> Agreement:
    """``sign_agreement`` of two vectors whose names and shapes are known to be equal."""
    counts = {name: _count(value, b[name], zero) for name, value in a.items()}
    groups: dict[str, list[_Count]] = {}
    if by is not None:
        for name, count in counts.items():
            groups.setdefault(group_of(name, by), []).append(count)
    return _total(counts.values(), {name: _total(parts, {}) for name, parts in groups.items()})


def group_of(name: str, by: By) -> str:
    """Return the group of a parameter; a block is its name up to the first number, or else its module.

    Example:
        >>> group_of("model.layers.3.mlp.up.weight", "block"), group_of("lm_head.weight", "block")
        ('model.layers.3', 'lm_head')
    """
    if callable(by):
        return by(name)
    if isinstance(by, Mapping):
        return by.get(name, "other")
    require(by in {"tensor", "block"}, "by", repr(by), "unknown grouping", 'pass "tensor", "block" or a mapping')
    if by == "tensor":
        return name
    match = _BLOCK.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def chance_level(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Return the expected share of agreeing signs under a random permutation of one tensor's elements.

    With p the positive share of the nonzero elements it is p_a p_b + (1 − p_a)(1 − p_b), exact given that one pair
    votes: each such pair is a random voter of a beside a random voter of b. Arguments are (positive, negative) counts.

    Example:
        >>> chance_level((3, 1), (1, 1))
        0.5
    """
    voters = sum(a) * sum(b)
    return (a[0] * b[0] + a[1] * b[1]) / voters if voters else math.nan


def _count(x: Tensor, y: Tensor, zero: Zero) -> _Count:
    y = y.to(x.device)
    up, up_other = x > 0, y > 0
    down, down_other = (~up, ~up_other) if zero == "minus" else (x < 0, y < 0)
    agree = (up & up_other) | (down & down_other)
    both = (up | down) & (up_other | down_other)
    votes = int(both.sum())
    level = chance_level((int(up.sum()), int(down.sum())), (int(up_other.sum()), int(down_other.sum())))
    # bfloat16 would round the sum of the two magnitudes; float32 does so 65,536 times less
    weight = x.abs().to(torch.promote_types(x.dtype, torch.float32)) + y.abs()
    return _Count(
        agree=int(agree.sum()),
        votes=votes,
        expected=votes * level if votes else 0.0,
        agree_weight=float((weight * agree).sum(dtype=torch.float64)),
        vote_weight=float((weight * both).sum(dtype=torch.float64)),
        elements=x.numel(),
    )


def _total(counts: Iterable[_Count], groups: Mapping[str, Agreement]) -> Agreement:
    """Combine the counts of several tensors."""
    parts = list(counts)
    voting = [part for part in parts if part.votes]
    votes, elements = sum(part.votes for part in parts), sum(part.elements for part in parts)
    agree, expected = sum(part.agree for part in parts), sum(part.expected for part in parts)
    weight = sum(part.vote_weight for part in parts)
    return Agreement(
        element=_share(agree, votes),
        tensor=_share(sum(part.agree / part.votes for part in voting), len(voting)),
        weighted=_share(sum(part.agree_weight for part in parts), weight),
        chance=_share(expected, votes),
        # Where all signs are certain, rounding leaves a tiny 1 − chance instead of 0
        corrected=_share(agree - expected, votes - expected) if votes - expected > 1e-9 * votes else math.nan,
        zeros=_share(elements - votes, elements),
        votes=int(votes),
        groups=groups,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
