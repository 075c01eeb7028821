"""Bytes by category, and amounts of memory as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sparing.errors import UserError

Category = Literal["params", "grads", "optimizer", "activations", "transient"]
Phase = Literal["forward", "backward", "step"]

CATEGORIES: Final[tuple[Category, ...]] = ("params", "grads", "optimizer", "activations", "transient")
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "step")

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTOR: Final[dict[str, int]] = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)} | {
    unit.lower(): 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))
}
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of memory by what they hold.

    Example:
        >>> (Bytes(params=4, grads=4) + Bytes(optimizer=8)).total
        16
    """

    params: int = 0
    """Parameters and buffers (bytes)."""

    grads: int = 0
    """Gradients of parameters, the tensors in ``.grad`` (bytes)."""

    optimizer: int = 0
    """Tensors in the optimizer's state (bytes)."""

    activations: int = 0
    """Everything created in a forward pass, recomputed activations and the batch included (bytes)."""

    transient: int = 0
    """Temporaries of the backward pass and of the optimizer's step (bytes)."""

    def __add__(self, other: Bytes) -> Bytes:
        """Add category by category; a ``Profile`` adds as the bytes at its peak."""
        return Bytes(*(getattr(self, name) + getattr(other, name) for name in CATEGORIES))

    @property
    def total(self) -> int:
        """Sum of all categories (bytes)."""
        return self.params + self.grads + self.optimizer + self.activations + self.transient


@dataclass(frozen=True, slots=True)
class Profile(Bytes):
    """Memory of one training step in the steady state, in which the optimizer's state exists.

    The categories are those of one instant, the peak, so ``total`` is the peak. The categories need not be at their own
    largest then: ``phases`` has the composition at the end of each phase.
    """

    phases: Mapping[Phase, Bytes] = field(default_factory=dict)
    """Composition at the end of the ``forward`` pass, of the ``backward`` pass and of the optimizer's ``step``."""


def parse_bytes(written: str | int) -> int:
    """Read an amount of memory.

    Args:
        written: Bytes as a whole number, or text with a unit: ``kB MB GB TB PB`` are powers of 1000,
            ``KiB MiB GiB TiB PiB`` powers of 1024, in any case; a bare number is bytes.

    Returns:
        Bytes, rounded to a whole number.

    Raises:
        UserError: If the text is not an amount, or its unit does not say which of the two it is ("24G").

    Example:
        >>> parse_bytes("24GB"), parse_bytes("24 GiB"), parse_bytes(7)
        (24000000000, 25769803776, 7)
    """
    match = _WRITTEN.fullmatch(str(written).strip())
    factor = _FACTOR.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise UserError(
            "memory", got=repr(written), why="it is not an amount with a known unit", do='write "24GB" or "24GiB"'
        )
    # in integers: floats would round amounts above 2**53
    whole, _, decimals = match[1].partition(".")
    scale = int("1" + "0" * len(decimals))
    return (2 * int(whole + decimals) * factor + scale) // (2 * scale)


def format_bytes(count: int) -> str:
    """Write bytes in binary units with one decimal.

    Args:
        count: Bytes.

    Returns:
        The amount in the largest unit that leaves a number of at least one.

    Example:
        >>> format_bytes(24_051_816_858), format_bytes(512)
        ('22.4 GiB', '512 B')
    """
    # by bits: math.log(1024**5 - 1, 1024) is rounded to 5.0
    power = min(max(abs(count).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    return f"{count / 1024**power:.1f} {_BINARY[power]}" if power else f"{count} B"
