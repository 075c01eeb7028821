"""Where the slices lie: flat tensors cut along nested axes, each finer slice inside the coarser one of the same rank.

Axes are counted from the innermost: sizes (m, g) are the ranks of a group and the groups. Cutting innermost first is
what makes slices nest, so that going from G to I is an all-gather over the groups whose pieces arrive in order, and
going back is a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from sparing.errors import require


def coords_of(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Place (j, i, …) of rank r = i·m + j on each axis, innermost first."""
    require(0 <= rank < prod(sizes), "rank", rank, f"there are {prod(sizes)} ranks", f"pass 0 to {prod(sizes) - 1}")
    found = []
    for size in sizes:
        rank, index = divmod(rank, size)
        found.append(index)
    return tuple(found)


def block_index(coords: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Which of the n equal blocks of a tensor is this rank's own at the finest level: j·g + i.

    That is not the rank, unless there is one axis.
    """
    index = 0
    for at, size in zip(coords, sizes, strict=True):
        index = index * size + at
    return index


@dataclass(frozen=True, slots=True)
class Layout:
    """How one flat tensor is padded and cut.

    Example:
        >>> layout = Layout(sizes=(2, 2), length=13)
        >>> layout.padded, layout.slice(1, (1, 0)), layout.slice(2, (1, 0))
        (16, (8, 8), (8, 4))
    """

    sizes: tuple[int, ...]  # axes, innermost first (m, g, …)
    length: int  # true elements, L
    multiple: int = 1  # the padded tensor has a multiple of so many elements, besides

    def __post_init__(self) -> None:
        sizes = self.sizes
        whole = len(sizes) >= 1 and all(size >= 1 for size in sizes)
        require(whole, "sizes", sizes, "every axis has at least one rank", "pass positive sizes, innermost first")
        require(self.length >= 0, "length", self.length, "a tensor has no negative size", "pass its elements")

    @property
    def world(self) -> int:
        """Number of ranks, n."""
        return prod(self.sizes)

    @property
    def tiers(self) -> int:
        """Number of axes, k."""
        return len(self.sizes)

    @property
    def padded(self) -> int:
        """Elements after padding, S = n·⌈L/n⌉; with ``multiple`` its least common multiple with n in place of n."""
        unit = lcm(self.world, self.multiple)
        return unit * -(-self.length // unit)

    def size(self, level: int) -> int:
        """Elements of one slice: S over the product of the ``level`` innermost axes."""
        require(0 <= level <= self.tiers, "level", level, f"there are {self.tiers} axes", f"pass 0 to {self.tiers}")
        return self.padded // prod(self.sizes[:level])

    def slice(self, level: int, coords: tuple[int, ...]) -> tuple[int, int]:
        """Offset and length of a rank's slice in the padded tensor."""
        size, offset = self.size(level), 0
        inside = len(coords) == self.tiers and all(0 <= at < w for at, w in zip(coords, self.sizes, strict=True))
        require(inside, "coords", coords, f"the axes have {self.sizes} ranks", "pass one place per axis")
        for axis in range(level):
            offset += coords[axis] * self.size(axis + 1)
        return offset, size

    def within(self, inner_level: int, outer_level: int, coords: tuple[int, ...]) -> tuple[int, int]:
        """Offset and length of a rank's finer slice inside its coarser one."""
        why = f"a slice at level {inner_level} does not lie inside one at level {outer_level}"
        require(inner_level >= outer_level, "levels", (inner_level, outer_level), why, "pass the finer level first")
        inner, size = self.slice(inner_level, coords)
        return inner - self.slice(outer_level, coords)[0], size

    def real(self, level: int, coords: tuple[int, ...]) -> int:
        """How many elements of a rank's slice are no padding; they come first."""
        offset, size = self.slice(level, coords)
        return min(max(self.length - offset, 0), size)
