"""How an engine works, besides its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparing.errors import require

SUMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes in which gradients can be summed


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How an engine works, besides its plan."""

    accumulate: int = 1  # micro-steps per optimizer step, s
    clip: float | None = None  # largest norm of the whole gradient
    prefetch: int = 1  # blocks gathered ahead
    reduce_dtype: torch.dtype | None = None  # of gradients on the wire; None: the accumulator's
    masters: bool = True  # whether 16-bit parameters have 32-bit copies that the optimizer changes
    # Factor on the loss, taken out of the gradients again. With one, a step whose gradients are not finite on any
    # rank is skipped on all.
    loss_scale: float | None = None
    check_every: int | None = None  # steps between two checks that replicas are equal

    def __post_init__(self) -> None:
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
        """Dtype of accumulator and optimizer: 32 bits for 16-bit parameters unless ``masters`` is off."""
        return torch.float32 if self.masters and dtype.itemsize < 4 else dtype
