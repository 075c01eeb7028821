"""One axis of the mesh as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the mesh as this rank sees it."""

    name: str  # ``intra``, ``middle``, ``inter``, or ``global`` where there is one
    size: int
    index: int  # my place on it
    ranks: tuple[int, ...]  # global ranks along it, in order of place
    group: ProcessGroup | None  # None where I am alone

    def neighbour(self, step: int) -> int:
        """Place ``step`` further on the ring, which is also the rank in ``group``: ranks rise along an axis."""
        return (self.index + step) % self.size
