"""Learning rates that hold for one optimizer step only, so that no scheduler ever sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def warmup_factor(step_in_interval: int, warmup: int) -> float:
    """Linear warm-up after a draw: ``min(1, (w + 1) / (W + 1))``.

    Example:
        >>> [warmup_factor(w, 3) for w in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (step_in_interval + 1) / (warmup + 1))


class ScaledRate:
    """Multiplies every group's learning rate while ``optimizer.step`` runs, and puts it back."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        """Hook into the optimizer."""
        self._factor = factor
        self._saved: list[tuple[dict[str, Any], Any]] = []
        self._handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def close(self) -> None:
        """Leave the optimizer as it was found."""
        self.put_back_()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back_()  # a step that raised left its rates in place
        factor = self._factor()
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            self._saved.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back_()

    def put_back_(self) -> None:
        """Undo the scaling; also after a step that raised."""
        for group, rate in self._saved:
            group["lr"] = rate
        self._saved.clear()
