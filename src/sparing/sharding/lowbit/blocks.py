"""Real numbers as small integers: blocks of them share a step that is a power of two.

A block whose largest magnitude is a = f · 2^E (½ ≤ f < 1) gets the step 2^(E - b + 1), b bits, or twice that where f
would round beyond the largest code, 2^(b-1) - 1. Multiplying by a power of two is exact, so

* the error of an element is at most half a step, which is the error of rounding to an integer;
* whatever lies on the grid, such as integers up to 127 in eight bits, travels unchanged;
* what rounding left has fewer significant bits than the element, so ``x - decoded`` is exact, too;
* sums of decoded numbers do not depend on whether a processor fuses multiplication and addition.

A payload of n elements is ⌈n·b/8⌉ bytes of codes and ⌈n/block⌉ bytes of exponents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (8, 4)  # of a code

BIAS = 127  # of an exponent byte, as in float32
LAST = 253  # largest exponent byte whose step and its inverse are normal float32 numbers
NOT_FINITE = 255  # exponent byte of a block with an infinity, a NaN, or numbers beyond float32

PIECE = 1 << 17  # elements encoded at a time (count): temporaries stay in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A format: integers of a few bits, with one exponent for each block."""

    bits: int
    block: int  # elements

    def nbytes(self, elements: int) -> int:
        """Length of the payload of so many elements (bytes)."""
        return -(-elements * self.bits // 8) - (-elements // self.block)

    def pieces(self, *parts: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Flat tensors of one length and their payload in pieces, each of whole blocks but the last."""
        step, length = PIECE // self.block * self.block, parts[0].numel()
        each = self.nbytes(step)
        for at, start in enumerate(range(0, length, step)):
            count = min(step, length - start)
            yield (*(part.narrow(0, start, count) for part in parts), payload[at * each :][: self.nbytes(count)])

    def encode_(self, x: Tensor, payload: Tensor) -> None:
        """Write a flat tensor (n,) into a payload of uint8; what rounding left of it stays in ``x``."""
        for at, (codes, scales) in self._cut(payload, x.numel()):
            part = x[at : at + self.block * scales.numel()]
            # codes of four bits need a pair for the last byte
            rows = torch.nn.functional.pad(part, (0, -part.numel() % (8 // self.bits))).view(scales.numel(), -1)
            self._encode_rows_(rows, codes.view(scales.numel(), -1), scales)
            if rows.data_ptr() != part.data_ptr():
                part.copy_(rows.view(-1)[: part.numel()])

    def decoded(self, payload: Tensor, elements: int) -> Tensor:
        """The numbers of a payload, float32 (n,); not finite where a block was not."""
        found = torch.empty(elements + elements % 2, dtype=torch.float32)
        for at, (codes, scales) in self._cut(payload, elements):
            rows = found[at : at + codes.numel() * (8 // self.bits)].view(scales.numel(), -1)
            self._decode_rows_(rows, codes.view(scales.numel(), -1), scales)
        return found[:elements]

    def _cut(self, payload: Tensor, elements: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """First element, codes and exponents of the whole blocks, and of what is left beyond them."""
        codes, scales = payload.tensor_split([-(-elements * self.bits // 8)])
        count = elements // self.block
        whole, used = count * self.block, count * self.block * self.bits // 8
        if count:
            yield 0, (codes[:used], scales[:count])
        if whole < elements:
            yield whole, (codes[used:], scales[count:])

    def _encode_rows_(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        largest = rows.abs().amax(1)
        mantissa, exponent = torch.frexp(largest)
        power = exponent + (mantissa >= 1 - 2.0**-self.bits) + (BIAS + 1 - self.bits)
        power = power.clamp_(1).masked_fill_(~largest.isfinite() | (power > LAST), NOT_FINITE)
        scales.copy_(power)
        rounded = (rows * _steps(2 * BIAS - power, rows.dtype)).round_()
        if self.bits == 8:
            codes.view(torch.int8).copy_(rounded)
        else:
            # Codes of a block's second half lie in the upper half of a byte, so that both are runs in memory.
            low, high = rounded.tensor_split(2, 1)
            codes.copy_(torch.add(low, high, alpha=16).add_(136))
        rows.addcmul_(rounded, _steps(power, rows.dtype), value=-1)

    def _decode_rows_(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        if self.bits == 8:
            rows.copy_(codes.view(torch.int8))
        else:
            low, high = rows.tensor_split(2, 1)
            low.copy_(codes & 15)
            high.copy_(codes >> 4)
            rows.sub_(8)
        rows.mul_(_steps(scales.int(), rows.dtype))


def _steps(power: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two from exponent bytes, as a column; infinite for ``NOT_FINITE``, whose inverse is zero."""
    return (power.clamp(0) << 23).view(torch.float32).to(dtype)[:, None]
