"""How little travels between groups."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.errors import require
from sparing.sharding.lowbit.blocks import BITS, Blocks

EXACT = 32  # bits, for ``LowBit.params``: parameters travel as they are


@dataclass(frozen=True, kw_only=True)
class LowBit:
    """Wires between groups that carry few bits an element, and a byte of scale for each block of elements.

    Gradients cross the outermost axis once for each time they are summed there: every group sends each owner its part,
    the owner adds in the accumulator's precision. What rounding left of a gradient is added to the next one. Parameters
    cross it as the difference between the master weights and what all ranks have. What is inside a group stays exact.

    Example:
        >>> LowBit(bits=4).grads.nbytes(1000), LowBit().grads.nbytes(1000)
        (516, 1016)

    Source: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), Jia et al. 2024 (SDP4Bit, arXiv:2410.15526); scales as in the
    Microscaling formats (Rouhani et al. 2023, arXiv:2310.10537).
    """

    bits: int = 8
    """Bits of an element, with its sign: 8 or 4."""

    block: int = 64
    """Elements that share a scale (count, even)."""

    params: int | None = None
    """Bits of an element of a parameter's difference, if not ``bits``: 8, 4, or 32 to send parameters as they are."""

    feedback: bool = True
    """Whether what rounding left of a gradient is added to the next; without it, it is lost."""

    def __post_init__(self) -> None:
        why = "a code is a byte or half of one"
        require(self.bits in BITS, "LowBit.bits", self.bits, why, "pass 8 or 4")
        known = (None, *BITS, EXACT)
        require(self.params in known, "LowBit.params", self.params, why, "pass 8, 4, 32 (exact), or None")
        even = self.block >= 2 and self.block % 2 == 0
        require(even, "LowBit.block", self.block, "codes of four bits share bytes in pairs", "pass an even count")

    @property
    def grads(self) -> Blocks:
        """Format of gradients."""
        return Blocks(bits=self.bits, block=self.block)

    @property
    def changes(self) -> Blocks | None:
        """Format of parameters' differences; none: parameters travel as they are."""
        bits = self.params or self.bits
        return None if bits == EXACT else Blocks(bits=bits, block=self.block)

    def lags(self, params: int, optimizer: int, tiers: int) -> bool:
        """Whether parameters at a level take changes in few bits from an optimizer at a level, and so lag behind it."""
        return self.changes is not None and params < optimizer == tiers
