"""Axes of tensors whose elements may be reordered together without changing what a net computes.

An axis is a leaf, whose elements go in any order; a product, as heads × channels that share a dimension; or a sequence,
as query, key and value side by side. Two axes that a net adds, multiplies or contracts must be in one order, so they
are united; where no order but the given one is safe, an axis is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class Leaf:
    """Elements that go in any order, unless pinned; it may turn out to be made of other axes."""

    size: int  # elements (count)
    pinned: bool = False
    made_of: Axis | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """Axes that share a dimension, the outermost first."""

    parts: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Elements (count)."""
        return prod(part.size for part in self.parts)


@dataclass(frozen=True, eq=False, slots=True)
class Sequel:
    """Axes that follow each other in a dimension."""

    parts: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Elements (count)."""
        return sum(part.size for part in self.parts)


Axis = Leaf | Product | Sequel

Orders = Mapping[Leaf, Tensor]  # of leaves: element i is taken from place order[i], int64, shape (size,)


def pinned(size: int) -> Leaf:
    """An axis that stays in the given order."""
    return Leaf(size, pinned=True)


def resolve(axis: Axis) -> Axis:
    """What an axis is known to be by now: a leaf, or two or more parts of which one at least is free."""
    if isinstance(axis, Leaf):
        if axis.made_of is None:
            return axis if axis.size > 1 else pinned(axis.size)
        return resolve(axis.made_of)
    parts: list[Axis] = []
    for part in map(resolve, axis.parts):
        parts += part.parts if isinstance(part, type(axis)) else [part]
    # one element is no factor, and none are no part
    parts = [part for part in parts if part.size != (1 if isinstance(axis, Product) else 0)]
    if all(isinstance(part, Leaf) and part.pinned for part in parts):
        return pinned(axis.size)
    return parts[0] if len(parts) == 1 else type(axis)(tuple(parts))


def leaves(axis: Axis) -> list[Leaf]:
    """The free leaves of an axis, each as often as it occurs."""
    axis = resolve(axis)
    if isinstance(axis, Leaf):
        return [] if axis.pinned else [axis]
    return [leaf for part in axis.parts for leaf in leaves(part)]


def is_pinned(axis: Axis) -> bool:
    """Whether an axis has no order but the given one."""
    return not leaves(axis)


def pin(*axes: Axis) -> None:
    """Keep axes in the given order."""
    for axis in axes:
        for leaf in leaves(axis):
            leaf.pinned = True


def unite(a: Axis, b: Axis) -> None:
    """Demand that two axes of one size are in one order."""
    assert a.size == b.size
    a, b = resolve(a), resolve(b)
    if a is b:
        return
    if is_pinned(a) or is_pinned(b):
        pin(a, b)
    elif isinstance(a, Leaf) or isinstance(b, Leaf):
        leaf, other = (a, b) if isinstance(a, Leaf) else (b, a)
        assert isinstance(leaf, Leaf)
        if leaf in leaves(other):
            pin(other)
        else:
            leaf.made_of = other
    elif isinstance(a, Product) and isinstance(b, Product):
        _unite_parts(a.parts, b.parts, split_product)
    elif isinstance(a, Sequel) and isinstance(b, Sequel):
        _unite_parts(a.parts, b.parts, split_sequel)
    else:
        pin(a, b)


def _unite_parts(a: Sequence[Axis], b: Sequence[Axis], split: Callable[[Axis, int], tuple[Axis, Axis] | None]) -> None:
    """Unite two rows of parts from the left, the larger of two parts split to the size of the other."""
    mine, theirs = list(a), list(b)
    while mine and theirs:
        if mine[0].size < theirs[0].size:
            mine, theirs = theirs, mine
        larger, smaller = resolve(mine.pop(0)), theirs.pop(0)
        if larger.size == smaller.size:
            unite(larger, smaller)
            continue
        halves = split(larger, smaller.size)
        if halves is None:
            pin(larger, smaller, *mine, *theirs)
            return
        unite(halves[0], smaller)
        mine.insert(0, halves[1])


def split_product(axis: Axis, outer: int) -> tuple[Axis, Axis] | None:
    """Split a leaf into an outer axis of a size and an inner one; None where it has no such parts."""
    axis = resolve(axis)
    if not isinstance(axis, Leaf) or axis.size % outer:
        return None
    halves = Leaf(outer, axis.pinned), Leaf(axis.size // outer, axis.pinned)
    if not axis.pinned:
        axis.made_of = Product(halves)
    return halves


def split_sequel(axis: Axis, first: int) -> tuple[Axis, Axis] | None:
    """Split a leaf into a first part of a size and the rest; None where it has no such parts."""
    axis = resolve(axis)
    if not isinstance(axis, Leaf) or not 0 < first < axis.size:
        return None
    halves = Leaf(first, axis.pinned), Leaf(axis.size - first, axis.pinned)
    if not axis.pinned:
        axis.made_of = Sequel(halves)
    return halves


def reshape(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Axes of a tensor of axes after a reshape; what is cut across a boundary is pinned."""
    if 0 in sizes:
        return [pinned(size) for size in sizes]
    left = [part for axis in axes for part in _factors(axis)]
    found: list[Axis] = []
    for size in sizes:
        parts: list[Axis] = []
        need = size
        while need > 1:
            axis = left.pop(0)
            if axis.size > need:
                halves = split_product(axis, need)
                if halves is None:
                    return _all_pinned([*axes], sizes)
                axis, rest = halves
                left[:0] = _factors(rest)
            if need % axis.size:
                return _all_pinned([*axes], sizes)
            need //= axis.size
            parts.append(axis)
        found.append(parts[0] if len(parts) == 1 else Product(tuple(parts)))
    return found


def _factors(axis: Axis) -> list[Axis]:
    axis = resolve(axis)
    parts = axis.parts if isinstance(axis, Product) else (axis,)
    return [part for part in parts if part.size > 1]


def _all_pinned(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    pin(*axes)
    return [pinned(size) for size in sizes]


def indices(axis: Axis, orders: Orders) -> Tensor:
    """Places that the elements of an axis are taken from, int64, shape (size,); leaves without an order stay."""
    axis = resolve(axis)
    if isinstance(axis, Leaf):
        return orders.get(axis, torch.arange(axis.size))
    found = indices(axis.parts[0], orders)
    for part in axis.parts[1:]:
        inner = indices(part, orders)
        if isinstance(axis, Product):
            found = (found[:, None] * part.size + inner).flatten()
        else:
            found = torch.cat([found, inner + len(found)])
    return found


def places(axis: Axis, leaf: Leaf) -> list[Tensor]:
    """Where a leaf's elements lie: places for each of its occurrences in an axis, int64, shape (leaf's size, other)."""
    axis = resolve(axis)
    if isinstance(axis, Leaf):
        return [torch.arange(axis.size)[:, None]] if axis is leaf else []
    found: list[Tensor] = []
    start = 0
    for at, part in enumerate(axis.parts):
        if isinstance(axis, Sequel):
            found += [one + start for one in places(part, leaf)]
            start += part.size
            continue
        outer, inner = (prod(one.size for one in some) for some in (axis.parts[:at], axis.parts[at + 1 :]))
        for one in places(part, leaf):
            every = torch.arange(outer)[:, None] * part.size
            grid = (every[None] + one[:, None]) * inner  # (leaf, outer, other)
            found.append((grid[..., None] + torch.arange(inner)).flatten(1))
    return found
