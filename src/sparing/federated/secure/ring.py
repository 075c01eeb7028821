"""Updates as integers modulo 2^bits: multiples of a step, whose sum over a round's clients cannot wrap around."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparing.errors import UserError, require

Ints = NDArray[np.uint64]
"""Integers modulo 2^bits, in [0, 2^bits)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Integers modulo 2^bits that stand for multiples of ``step``, up to ``bound`` in size for each client."""

    bits: int  # a multiple of 8, 16 to 64: so many travel for each element
    bound: float  # largest |element| that a client may send
    step: float

    def __post_init__(self) -> None:
        whole = self.bits in range(16, 65, 8)
        require(whole, "bits", self.bits, "whole bytes travel", "pass 16, 24, 32, 40, 48, 56 or 64")
        fine = 0 < self.bound < math.inf
        require(fine, "bound", self.bound, "it is the largest element of an update", "pass a finite number > 0")
        fine = 0 < self.step <= self.bound
        require(fine, "step", self.step, "every element would be rounded to zero", "pass 0 < step <= bound")

    @property
    def largest(self) -> int:
        """Largest integer of one client (count of steps)."""
        return round(self.bound / self.step)

    def check(self, clients: int) -> None:
        """Refuse so many clients that their sum could wrap around."""
        most, reach = (1 << self.bits - 1) - 1, clients * self.largest
        why = f"{clients} clients with {self.largest} steps each way sum to {reach}, and {self.bits} bits hold {most}"
        least = 8 * math.ceil((reach.bit_length() + 1) / 8)
        do = f"pass {f'bits={least}, ' if least <= 64 else ''}a larger step, or a smaller bound"
        require(reach <= most, "bits", self.bits, why, do)

    def encode(self, values: NDArray[np.float64]) -> Ints:
        """Round to multiples of the step, halves to even; what lies beyond the bound is refused, never cut off."""
        size = float(np.abs(values).max(initial=0.0))
        if not size <= self.bound:
            why, do = (
                f"an element of an update may be {self.bound:g} at most",
                "pass a larger bound=, or lower the rates",
            )
            raise UserError("update", got=f"an element of size {size:.3g}", why=why, do=do)
        rounded: Ints = np.rint(values / self.step).astype(np.int64).view(np.uint64) & self._mask
        return rounded

    def decode(self, total: Ints) -> NDArray[np.float64]:
        """Return the sum that the integers stand for, exactly as the step is."""
        signed = (total << np.uint64(64 - self.bits)).view(np.int64) >> np.int64(64 - self.bits)
        return signed.astype(np.float64) * self.step

    def add(self, one: Ints, other: Ints, sign: int = 1) -> Ints:
        """Return one ± other, modulo 2^bits."""
        found: Ints = (one + other if sign > 0 else one - other) & self._mask
        return found

    def pack(self, values: Ints) -> bytes:
        """Return bits/8 bytes for each element, least first."""
        whole = np.ascontiguousarray(values.astype("<u8")).view(np.uint8)
        return whole.reshape(-1, 8)[:, : self.bits // 8].tobytes()

    def unpack(self, data: bytes) -> Ints:
        """Read what ``pack`` wrote."""
        size = self.bits // 8
        whole: NDArray[Any] = np.zeros((len(data) // size, 8), np.uint8)
        whole[:, :size] = np.frombuffer(data, np.uint8).reshape(-1, size)
        return whole.view("<u8")[:, 0].astype(np.uint64)

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self.bits) - 1)
