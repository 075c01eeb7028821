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
    tflops32: float  # float32 products, which torch does not round to TF32 unless told (10¹² operations/s)
    bus: float  # PCI Express to host memory, each way (GB/s)
    bfloat16: bool = True  # whether its matrix units take that type

    def peak(self, dtype: str) -> float | None:
        """Operations of matrix products at their peak (10¹²/s); None for a type that its units do not take."""
        known = {"bfloat16": self.tflops if self.bfloat16 else None, "float32": self.tflops32}
        return known.get(dtype)


CARDS: Final[dict[str, Card]] = {
    "t4": Card("16GB", 65, 320, 8.1, 16, bfloat16=False),
    "l4": Card("24GB", 121, 300, 30.3, 32),
    "a10g": Card("24GB", 70, 600, 31.5, 32),
    "rtx3090": Card("24GB", 71, 936, 35.6, 32),
    "rtx4090": Card("24GB", 165, 1008, 82.6, 32),
    "rtx5090": Card("32GB", 209, 1792, 104.8, 64),
    "l40s": Card("48GB", 362, 864, 91.6, 32),
    "a100-40": Card("40GB", 312, 1555, 19.5, 32),
    "a100-80": Card("80GB", 312, 2039, 19.5, 32),
    "h100": Card("80GB", 989, 3350, 67, 64),
    "h200": Card("141GB", 989, 4800, 67, 64),
    "b200": Card("180GB", 2250, 8000, 75, 64),
}

REACHED: Final = 0.4
"""Share of a card's peak that passes of a language model reach, by common reports (30 to 55 %); ``--tflops`` takes the
place of this guess."""
