"""What rounding left of gradients that were sent, added to the next ones: error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of a flat tensor: first element, elements.
Ranges = Sequence[tuple[int, int]]


class Residual:
    """What this rank still owes of one bucket's gradients: for each element, all it was given minus all it has sent.

    ``value`` has the length of a slice that the outermost axis cuts. The part of each other rank of that axis holds
    what was rounded on the way there; my own part what I, who sum it, was to send on and did not. A step that is
    skipped or dropped changes nothing where ``guarded``; elsewhere what it touched is forgotten, at most half a step
    of the grid for each element.
    """

    def __init__(self, length: int, *, dtype: torch.dtype, guarded: bool) -> None:
        self.value = torch.zeros(length, dtype=dtype)
        self.guarded = guarded  # whether the value before the step is kept until its end
        self._before: Tensor | None = None
        self._touched = False

    def begin_(self) -> None:
        """Before the first change in a step; later calls do nothing."""
        if not self._touched and self.guarded:
            self._before = self.value.clone()
        self._touched = True

    def end_(self, *, applied: bool) -> None:
        """After a step, when nothing is on its way: whether the optimizer has used what was sent."""
        if self._touched and not applied:
            if self._before is None:
                self.value.zero_()
            else:
                self.value = self._before
        self._before, self._touched = None, False


def set_aside_(residual: Tensor, gradient: Tensor, ranges: Ranges) -> list[tuple[Tensor, Tensor]]:
    """Take out what is owed to parameters whose gradient is zero here: (place, content), for ``bring_back_``.

    The optimizer passes over a parameter without a gradient on any rank, so what would be sent for it would be lost.
    """
    held = []
    for at, length in ranges:
        if not gradient.narrow(0, at, length).any():
            place = residual.narrow(0, at, length)
            held.append((place, place.clone()))
            place.zero_()
    return held


def bring_back_(held: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put back what was taken out, beside what has come meanwhile."""
    for place, content in held:
        place.add_(content)
