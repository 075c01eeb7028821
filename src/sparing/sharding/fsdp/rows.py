"""Where the rows of parameters lie: ``fully_shard`` cuts each along its first dimension and pads it to equal pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor


def rows_of(rows: int, ranks: int, place: int) -> tuple[int, int]:
    """First row and number of rows of one rank, as ``torch.chunk`` cuts: the last ranks may have fewer, or none.

    Example:
        >>> [rows_of(5, 4, place) for place in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    size = -(-rows // ranks)
    first = min(place * size, rows)
    return first, min(size, rows - first)


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of several parameters in one flat tensor, each padded to the most rows that any rank has."""

    shapes: tuple[tuple[int, ...], ...]  # of what is cut
    ranks: int
    place: int
    # Most rows of what is cut, where other ranks cut more than these do: all must send the same lengths.
    most: tuple[int, ...]

    @property
    def mine(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of my pieces, without padding."""
        return tuple((rows_of(shape[0], self.ranks, self.place)[1], *shape[1:]) for shape in self.shapes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each piece, padding included; the same on all ranks."""
        held = zip(self.most, self.shapes, strict=True)
        return tuple(-(-most // self.ranks) * prod(shape[1:]) for most, shape in held)

    @property
    def size(self) -> int:
        """Elements of one rank's flat tensor."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """My pieces in a flat tensor of at least ``size`` elements."""
        for offset, shape in zip(accumulate(self.sizes, initial=0), self.mine, strict=False):
            yield flat.narrow(0, offset, prod(shape)).view(shape)

    def pack_(self, out: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Lay whole tensors out for all ranks, (ranks · size,); padding of ``out`` stays."""
        for place, flat in enumerate(out.view(self.ranks, -1).unbind(0)):
            for view, rows in self._rows(flat, pieces, place):
                view.copy_(rows)
        return out

    def unpack_(self, pieces: Sequence[Tensor], packed: Tensor) -> None:
        """Write what ``pack_`` laid out back into whole tensors."""
        for place, flat in enumerate(packed.view(self.ranks, -1).unbind(0)):
            for view, rows in self._rows(flat, pieces, place):
                rows.copy_(view)

    def own(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """My rows of whole tensors, as views."""
        return [piece.narrow(0, *rows_of(piece.shape[0], self.ranks, self.place)) for piece in pieces]

    def _rows(self, flat: Tensor, pieces: Sequence[Tensor], place: int) -> Iterator[tuple[Tensor, Tensor]]:
        there = replace(self, place=place)
        yield from zip(there.views(flat), there.own(pieces), strict=True)


def fitted(flat: Tensor, parts: int) -> Tensor:
    """The tensor, or a copy of it with zeros behind, that so many ranks can share."""
    missing = -flat.numel() % parts
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
