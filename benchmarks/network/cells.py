"""What one measurement is of: a cell is groups × ranks, the two rates, the model, its trainable share, accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SHAPES = ((2, 2), (2, 4), (4, 2))
RATIOS = (1, 5, 25)
ACCUMULATE = (1, 4, 10)
TRAINABLE = (1.0, 1 / 16, 3 / 1000)

RATES = {1: (500e6, 500e6), 5: (500e6, 2.5e9), 25: (100e6, 2.5e9)}
"""B'/B -> (inter, intra) in bits per second. At 2.5 Gbit/s both ways two cores, not the links, would set the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One network and one problem; every arm of a cell does the same arithmetic."""

    groups: int = 2
    """Groups, g."""

    per_group: int = 2
    """Ranks of a group, m."""

    inter: float = 100e6
    """Rate of the link that leaves a group, bits per second, shared by its ranks (κ = m): B of the issue."""

    intra: float = 2.5e9
    """Rate inside a group, bits per second, shared by its ranks: B'."""

    accumulate: int = 4
    """Micro-steps in one step, s."""

    trainable: float = 1.0
    """Share of the weights that is trained, Ψ'/Ψ, the same in every block."""

    blocks: int = 8
    """Blocks of Linear–GELU–Linear."""

    width: int = 512
    """Width of every Linear."""

    batch: int = 8
    """Examples of one micro-step on one rank."""

    seed: int = 0
    """Seeds weights and data."""

    @property
    def world(self) -> int:
        """Ranks in all, n."""
        return self.groups * self.per_group

    @property
    def ratio(self) -> float:
        """B'/B."""
        return self.intra / self.inter

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


REFERENCE = Cell()
"""The cell of the issue: 2 × 2 ranks, 100 Mbit/s between groups, 2.5 Gbit/s inside."""


def grid(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    ratios: Sequence[int] = RATIOS,
    accumulates: Sequence[int] = ACCUMULATE,
    trainables: Sequence[float] = TRAINABLE,
    **model: Any,
) -> list[Cell]:
    """Every cell of a grid; cells that need the same ranks stand together.

    Args:
        shapes: Groups and ranks of a group.
        ratios: B'/B, each a key of ``RATES``.
        accumulates: Micro-steps.
        trainables: Shares of the weights that are trained.
        **model: Other fields of every cell: blocks, width, batch, seed.

    Returns:
        81 cells where nothing else is said.
    """
    return [
        Cell(
            groups=groups, per_group=ranks, inter=RATES[ratio][0], intra=RATES[ratio][1],
            accumulate=accumulate, trainable=trainable, **model,
        )
        for (groups, ranks), ratio, accumulate, trainable in itertools.product(shapes, ratios, accumulates, trainables)
    ]  # fmt: skip
