"""How an engine works, besides its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparing.errors import require

SUMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Number formats in which gradients can be added up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How an engine works, besides its plan."""

    accumulate: int = 1
    """Micro-steps per optimizer step (count); the paper's s."""

    clip: float | None = None
    """Largest norm of the whole gradient; None: not clipped."""

    prefetch: int = 1
    """Blocks that are gathered ahead (count)."""

    reduce_dtype: torch.dtype | None = None
    """Number format of gradients on the wire; None: the accumulator's."""

    masters: bool = True
    """Whether parameters of 16 bits have 32-bit copies that the optimizer changes."""

    loss_scale: float | None = None
    """Factor on the loss before the backward pass, taken out of the gradients again; None: 1. With one, a step whose
    gradients are not finite on any rank is skipped on all."""

    check_every: int | None = None
    """Steps between two checks that replicas are equal (count); None: only when ``check`` is called."""

    def __post_init__(self) -> None:
        """Refuse counts below one and sizes that are none.

        Raises:
            UserError: If a setting is out of range.
        """
        require(self.accumulate >= 1, "accumulate", self.accumulate, "it counts micro-steps", "pass 1 or more")
        require(self.prefetch >= 0, "prefetch", self.prefetch, "it counts blocks", "pass 0 or more")
        every = self.check_every
        require(every is None or every >= 1, "check_every", every, "it counts steps", "pass 1 or more, or None")
        fits = self.reduce_dtype is None or self.reduce_dtype in SUMS
        why, do = "sums of gradients in it round to nothing", f"pass {' or '.join(str(kind) for kind in SUMS)}, or None"
        require(fits, "reduce_dtype", self.reduce_dtype, why, do)
        for name in ("clip", "loss_scale"):
            value = getattr(self, name)
            fits = value is None or (value > 0 and math.isfinite(value))
            require(fits, name, value, "it is a positive size", "pass a positive number, or None")

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Number format of accumulator and optimizer for parameters of a format.

        Args:
            dtype: Of the parameters.

        Returns:
            32 bits for parameters of 16 unless ``masters`` is off, else their own.
        """
        return torch.float32 if self.masters and dtype.itemsize < 4 else dtype
