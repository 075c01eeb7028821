"""Where the live weights of a matrix are: by rows, by columns, and in blocks of columns for the kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError

_INT32 = torch.iinfo(torch.int32).max
_BLOCK, _DENSE = 192, 0.15  # columns of a block, and from which density on blocks pay; measured at widths 512 to 2048


@dataclass(frozen=True, eq=False)  # without slots: it remembers that it was checked
class Pattern:
    """Where the live weights of a matrix [out, in] are, by rows and by columns; immutable, so copies share it."""

    shape: tuple[int, int]  # fan-out and fan-in (counts)
    blocks: int  # of neighbouring columns, which the kernel takes one after the other (count)
    begin: Tensor  # live weights before each block of each row, int32 (int64 beyond 2³¹), shape (out · blocks + 1,)
    col: Tensor  # column of each live weight, row by row and ascending, shape (live,)
    crow_t: Tensor  # live weights before each column, shape (in + 1,)
    col_t: Tensor  # row of each live weight, column by column, shape (live,)
    order: Tensor  # values of the transpose are ``values[order]``, shape (live,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pattern:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was computed: addresses are those of this process.
        return Pattern, tuple(getattr(self, field.name) for field in fields(self))

    @functools.cached_property
    def live(self) -> int:
        """Number of live weights (count)."""
        return self.col.numel()

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where begin, col, crow_t, col_t and order lie in memory, once they are known to stay within bounds."""
        if not self._is_sound():  # raised, since ``python -O`` takes assertions away
            why = "by its indices C would read and write memory that is not ours"
            raise UserError("pattern of a sparse layer", got=self.shape, why=why, do="make it by pattern_of(mask)")
        return tuple(part.data_ptr() for part in (self.begin, self.col, self.crow_t, self.col_t, self.order))

    def _is_sound(self) -> bool:
        """Tell whether every index leads to a place that there is."""
        (out, into), live = self.shape, self.live
        parts = (self.begin, self.col, self.crow_t, self.col_t, self.order)
        ends, inside = ((self.begin, out * self.blocks), (self.crow_t, into)), (self.col, self.col_t, self.order)
        return (
            all(part.is_cpu and part.dtype == torch.int32 and part.is_contiguous() for part in parts)
            and all(of.numel() == count + 1 and of[0] == 0 and of[-1] == live for of, count in ends)
            and all(bool((of.diff() >= 0).all()) for of, _ in ends)
            and all(part.numel() == live for part in inside)
            and (
                not live
                or all(0 <= int(p.min()) <= int(p.max()) < n for p, n in zip(inside, (into, out, live), strict=True))
            )
        )

    @property
    def crow(self) -> Tensor:
        """Live weights before each row, shape (out + 1,)."""
        return self.begin[:: self.blocks].contiguous()

    @property
    def rows(self) -> Tensor:
        """Row of each live weight, int64, shape (live,)."""
        return torch.repeat_interleave(torch.arange(self.shape[0]), self.crow.diff().long())

    @property
    def flat(self) -> Tensor:
        """Ascending positions ``row · in + column`` of the live weights, int64, shape (live,)."""
        return self.rows * self.shape[1] + self.col

    @property
    def flat_t(self) -> Tensor:
        """The same of the transpose, ``column · out + row``, whose values are ``values[order]``."""
        columns = torch.repeat_interleave(torch.arange(self.shape[1]), self.crow_t.diff().long())
        return columns * self.shape[0] + self.col_t

    def matrix(self, values: Tensor) -> Tensor:
        """Return torch's CSR tensor [out, in] of live values, nothing copied or checked."""
        return torch.sparse_csr_tensor(self.crow, self.col, values, self.shape, check_invariants=False)

    def transposed_matrix(self, values: Tensor) -> Tensor:
        """Return the transpose [in, out] as CSR, its values put in order."""
        at = self.shape[::-1]
        return torch.sparse_csr_tensor(self.crow_t, self.col_t, values[self.order], at, check_invariants=False)

    @property
    def nbytes(self) -> int:
        """What the indices hold (bytes)."""
        return sum(part.nbytes for part in (self.begin, self.col, self.crow_t, self.col_t, self.order))


def pattern_of(mask: Tensor) -> Pattern:
    """Return the pattern of a boolean mask [out, in] on the CPU; indices are int32 where they fit."""
    if mask.ndim != 2 or mask.dtype != torch.bool:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise UserError("mask", got=got, why="a sparse layer needs a matrix of bool", do="give mask [out, in]")
    rows, cols = mask.nonzero(as_tuple=True)
    return _pattern_at(rows, cols, (mask.shape[0], mask.shape[1]))


def pattern_at(places: Tensor, shape: tuple[int, int]) -> Pattern:
    """Return the pattern [out, in] whose live weights are at ascending positions ``row · in + column``."""
    into = max(1, shape[1])
    return _pattern_at(places // into, places % into, shape)


def _pattern_at(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> Pattern:
    out, into = shape
    # Made once, for the backward pass, which multiplies by the transpose.
    by_column = torch.argsort(cols * out + rows)
    kind = torch.int32 if max(len(rows), *shape) < _INT32 else torch.int64
    blocks = blocks_of(out, into, len(rows))
    pieces = rows * blocks + cols // -(-into // blocks) if blocks > 1 else rows
    begin, crow_t = (
        torch.cat([rows.new_zeros(1), torch.bincount(of, minlength=count).cumsum(0)])
        for of, count in ((pieces, out * blocks), (cols, into))
    )
    parts = (begin, cols, crow_t, rows[by_column], by_column)
    return Pattern((out, into), blocks, *(part.to(kind) for part in parts))


def blocks_of(out: int, into: int, live: int) -> int:
    """Return how many blocks of columns the kernel takes (count), so that what dense rows share stays in its cache."""
    return max(1, round(into / _BLOCK)) if live > _DENSE * out * into else 1


def move_values(values: Tensor, old: Pattern, new: Pattern) -> Tensor:
    """Move values from one pattern to another of the same shape; new places get zero, nothing dense is made."""
    if old.live == 0:
        return values.new_zeros(new.live)
    # Both ascend, so a binary search finds each place without a dense matrix.
    before, after = old.flat, new.flat
    at = torch.searchsorted(before, after).clamp_(max=old.live - 1)
    return torch.where(before[at] == after, values[at], values.new_zeros(()))
