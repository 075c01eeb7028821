"""Rows of several files in one table, and how many of each a pass over them draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparing.errors import require
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.seeds import stream


@dataclass(frozen=True, slots=True)
class Mixture:
    """Rows that stand file after file, of which a pass draws other shares than there are."""

    rows: tuple[int, ...]  # of each file (count)
    drawn: tuple[int, ...]  # of each file in a pass (count); as many in all

    def rows_of(self, epoch: int, *, seed: int) -> Tensor:
        """The rows of one pass, int64, file after file; over all passes those of a file come equally often."""
        found = []
        for index, (rows, drawn) in enumerate(zip(self.rows, self.drawn, strict=True)):
            # the passes over this file alone, laid end to end and cut into what each pass over all draws
            first, last = epoch * drawn, (epoch + 1) * drawn
            turns = range(first // rows, (last - 1) // rows + 1)
            laid = torch.cat([torch.randperm(rows, generator=stream(seed, "mixture", index, turn)) for turn in turns])
            start = first - turns[0] * rows
            found.append(laid[start : start + drawn] + sum(self.rows[:index]))
        return torch.cat(found)


def apportion(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers in the ratio of shares that add up to a total, by the method of largest remainders.

    Example:
        >>> apportion((0.7, 0.3), 9)
        (6, 3)
    """
    exact = [total * share / sum(shares) for share in shares]
    found = [int(number) for number in exact]
    # ties go to the first, for sorting keeps the order of equals
    for index in sorted(range(len(exact)), key=lambda at: found[at] - exact[at])[: total - sum(found)]:
        found[index] += 1
    return tuple(found)


def _widened(values: Tensor, width: int, fill: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[1]), value=fill)


def _places(part: Packed, width: int) -> Tensor:
    """Positions of a table, and of padding, which is a document of its own."""
    tail = torch.arange(width - part.length)
    own = torch.arange(part.length).expand(part.rows, -1) if part.positions is None else part.positions
    return torch.cat([own, tail.expand(part.rows, -1)], dim=1)


def joined(parts: Sequence[Packed], *, pad: int, shares: Sequence[float] = ()) -> Packed:
    """Tables of several files as one; with ``shares``, each pass draws so many rows of each."""
    width, rows = max(part.length for part in parts), tuple(part.rows for part in parts)
    several = any(part.positions is not None for part in parts)
    drawn = apportion(shares, sum(rows)) if shares else rows
    why, do = f"a pass of {sum(rows)} rows draws none of one file", "pass larger shares, or fewer files"
    require(min(drawn) > 0, "mix", " ".join(map(str, shares)), why, do)
    return Packed(
        torch.cat([_widened(part.ids, width, pad) for part in parts]),
        torch.cat([_widened(part.labels, width, IGNORED) for part in parts]),
        torch.cat([_places(part, width) for part in parts]) if several else None,
        cut=sum(part.cut for part in parts),
        dropped=sum(part.dropped for part in parts),
        mixture=Mixture(rows, drawn) if shares and len(parts) > 1 else None,
    )
