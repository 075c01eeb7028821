"""Cards that people fine-tune on: their memory and, from their makers' data sheets, their speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CardName = Literal[
    "t4", "l4", "a10g", "rtx3090", "rtx4090", "rtx5090", "l40s", "a100-40", "a100-80", "h100", "h200", "b200"
]


@dataclass(frozen=True, slots=True)
class Card:
    """A card by the numbers of its data sheet."""

    memory: str
    tflops: float  # dense 16-bit matrix products with 32-bit sums, at their peak (10¹² operations/s)
    bandwidth: float  # of its memory (GB/s)


CARDS: Final[dict[str, Card]] = {
    "t4": Card("16GB", 65, 320),
    "l4": Card("24GB", 121, 300),
    "a10g": Card("24GB", 70, 600),
    "rtx3090": Card("24GB", 71, 936),
    "rtx4090": Card("24GB", 165, 1008),
    "rtx5090": Card("32GB", 209, 1792),
    "l40s": Card("48GB", 362, 864),
    "a100-40": Card("40GB", 312, 1555),
    "a100-80": Card("80GB", 312, 2039),
    "h100": Card("80GB", 989, 3350),
    "h200": Card("141GB", 989, 4800),
    "b200": Card("180GB", 2250, 8000),
}

REACHED: Final = 0.4
"""Share of a card's peak that passes of a language model reach, by common reports (30 to 55 %); ``--tflops`` takes the
place of this guess."""
