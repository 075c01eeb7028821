"""Ways to carry a tensor over several axes: one axis after the other, two at once, or one ring over the whole world.

Every route moves a tensor between the same levels with the same result; they differ in which bytes travel where, and
when. Slices nest innermost axis first, so each step works inside one slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from sparing.sharding.network.lanes import Handle, Lane
from sparing.sharding.network.rings import Ring
from sparing.sharding.network.wires import Collectives

Then = Callable[[Tensor], Tensor]
Continuation = Callable[[], None]


def _nothing() -> None:
    """No way back."""


class Chain:
    """The parts of one collective, queued on the lanes of their axes as they are added."""

    def __init__(self, lanes: Sequence[Lane], value: Tensor, after: Handle[Any] | None) -> None:
        self._lanes, self._value = lanes, value
        self._lane: Lane | None = None
        self.last = after

    def add(self, axis: int, run: Callable[[], object]) -> Handle[Tensor]:
        """Queue a part on an axis (from 1), behind the one added last."""
        return self.add_behind(self.last, axis, run)

    def add_behind(self, behind: Handle[Any] | None, axis: int, run: Callable[[], object]) -> Handle[Tensor]:
        """Queue a part behind the given one; with None, behind whatever its lane does before it."""
        value = self._value

        def part() -> Tensor:
            if behind is not None:
                behind.wait()
            run()
            return value

        self._lane = self._lanes[axis - 1]
        self.last = handle = self._lane.submit(part)
        return handle

    def finish(self, then: Then | None) -> Handle[Tensor]:
        """The handle of the whole; ``then`` maps its value, in the lane of the last part or here if nothing moved."""
        value, last = self._value, self.last
        if self._lane is not None and last is not None:
            return last if then is None else self._lane.submit(lambda: then(last.wait()))
        if last is not None and not last.done():
            # nothing moved, but the caller must not be blocked
            return self._lanes[0].submit(lambda: (last.wait(), value if then is None else then(value))[1])
        return Handle.of(value if then is None else then(value))


class TwoLevel:
    """One axis after the other: gathers from the outermost in, reductions from the innermost out."""

    def __init__(self, sizes: Sequence[int], coords: Sequence[int], collectives: Sequence[Collectives | None]) -> None:
        self.sizes, self.coords = tuple(sizes), tuple(coords)
        self._collectives = tuple(collectives)

    def with_outermost(self, slow: Collectives) -> TwoLevel:
        """The same route with other collectives on the outermost axis."""
        return TwoLevel(self.sizes, self.coords, (*self._collectives[:-1], slow))

    def slice(self, x: Tensor, frm: int, to: int) -> Tensor:
        """My level-``to`` slice of a level-``frm`` one."""
        start, length = 0, x.numel()
        for width, place in zip(self.sizes[frm:to], self.coords[frm:to], strict=True):
            length //= width
            start += place * length
        return x.narrow(0, start, length)

    def gather(self, chain: Chain, out: Tensor, frm: int, to: int) -> None:
        """Fill a level-``to`` slice from level-``frm`` ones."""
        for axis in reversed(self._active(to, frm)):
            chain.add(axis, partial(self._on(axis).all_gather_, self.slice(out, to, axis - 1)))

    def reduce(self, chain: Chain, x: Tensor, frm: int, to: int) -> None:
        """Sum a level-``frm`` slice over the axes up to ``to``, into my level-``to`` slice."""
        for axis in self._active(frm, to):
            chain.add(axis, partial(self._on(axis).reduce_scatter_, self.slice(x, frm, axis - 1)))

    def sync(self, chain: Chain, part: Tensor, frm: int, to: int) -> Continuation:
        """Complete a level-``frm`` sum going out; what is returned adds the way back, into my level-``to`` slice."""
        self.reduce(chain, part, frm, to)
        mine, outer = self.slice(part, frm, to), self._active(to, len(self.sizes))
        return self.all_reduce(chain, mine, to, outer) if outer else _nothing

    def all_reduce(self, chain: Chain, x: Tensor, level: int, axes: Sequence[int]) -> Continuation:
        """Sum a slice over axes beyond its level: reductions going out; what is returned adds the gathers back."""
        last = axes[-1]
        self.reduce(chain, x, level, last - 1)
        chain.add(last, partial(self._on(last).all_reduce_, self.slice(x, level, last - 1)))
        return partial(self.gather, chain, x, last - 1, level)

    def _active(self, coarse: int, fine: int) -> list[int]:
        """Axes between two levels along which anything moves."""
        return [axis for axis in range(coarse + 1, fine + 1) if self.sizes[axis - 1] > 1]

    def _on(self, axis: int) -> Collectives:
        found = self._collectives[axis - 1]
        assert found is not None
        return found


class Overlapped(TwoLevel):
    """Both lanes at once (PaRO-CC): the inner axis works on one column of blocks while the outer one brings the next.

    With m ranks on the inner axis and g on the outer, block q*g + k is the k-th of column k at inner place q. Blocking
    points: gather round h needs the block of outer step h - 1; outer reduction step h sends a column that is already
    reduced and adds into the next, whose inner reduction runs while the message travels.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        coords: Sequence[int],
        collectives: Sequence[Collectives | None],
        rings: Sequence[Ring | None],
    ) -> None:
        super().__init__(sizes, coords, collectives)
        self._rings = tuple(rings)

    def gather(self, chain: Chain, out: Tensor, frm: int, to: int) -> None:
        """Fill a level-``to`` slice from level-``frm`` ones."""
        axes = self._active(to, frm)
        if len(axes) < 2:
            super().gather(chain, out, frm, to)
            return
        inner, outer = axes[:2]
        super().gather(chain, self.slice(out, to, outer), frm, outer)
        first, second, blocks, i = *self._pair(inner, outer), self._blocks(out, inner, outer), self.coords[outer - 1]
        mine = blocks[self.coords[inner - 1]]
        start = arrived = chain.last
        # h = 0 spreads the column that is here already; the last round has nothing left to bring.
        for h in range(second.width):
            column = [row[(i - h) % second.width] for row in blocks]
            if h < second.width - 1:
                coming = chain.add_behind(start, outer, partial(second.gather_step, mine, h))
            chain.add_behind(arrived, inner, partial(first.all_gather_, column))
            arrived = coming

    def reduce(self, chain: Chain, x: Tensor, frm: int, to: int) -> None:
        """Sum a level-``frm`` slice over the axes up to ``to``, into my level-``to`` slice."""
        axes = self._active(frm, to)
        if len(axes) < 2:
            super().reduce(chain, x, frm, to)
            return
        inner, outer = axes[:2]
        first, second, blocks, i = *self._pair(inner, outer), self._blocks(x, inner, outer), self.coords[outer - 1]
        mine = blocks[self.coords[inner - 1]]
        start = chain.last

        def reduced(k: int) -> Handle[Tensor]:
            column = [row[k % second.width] for row in blocks]
            return chain.add_behind(start, inner, partial(first.reduce_scatter_, column))

        # Two columns are in work at a time: one is on the outer wire, the next is reduced inside the group.
        ready = reduced(i - 1)
        for h in range(second.width - 1):
            following = reduced(i - h - 2)
            chain.add_behind(ready, outer, partial(second.scatter_step, mine, h, following.wait))
            ready = following
        super().reduce(chain, self.slice(x, frm, outer), outer, to)

    def all_reduce(self, chain: Chain, x: Tensor, level: int, axes: Sequence[int]) -> Continuation:
        """Sum a slice over axes beyond its level: reductions going out; what is returned adds the gathers back."""
        if len(axes) < 2:
            return super().all_reduce(chain, x, level, axes)
        self.reduce(chain, x, level, axes[-1])
        return partial(self.gather, chain, x, axes[-1], level)

    def _pair(self, inner: int, outer: int) -> tuple[Ring, Ring]:
        first, second = self._rings[inner - 1], self._rings[outer - 1]
        assert first is not None
        assert second is not None
        return first, second

    def _blocks(self, x: Tensor, inner: int, outer: int) -> list[tuple[Tensor, ...]]:
        """Rows by inner place, columns by outer place."""
        grid = x.view(self.sizes[inner - 1], self.sizes[outer - 1], -1)
        return [row.unbind(0) for row in grid.unbind(0)]


class Flat(TwoLevel):
    """One ring over the world, in rank order, for what crosses all axes: the baseline that ignores the network."""

    def __init__(
        self, sizes: Sequence[int], coords: Sequence[int], collectives: Sequence[Collectives | None], world: Collectives
    ) -> None:
        super().__init__(sizes, coords, collectives)
        self._world, self._lane = world, len(self.sizes) + 1

    def gather(self, chain: Chain, out: Tensor, frm: int, to: int) -> None:
        """Fill a level-``to`` slice from level-``frm`` ones."""
        if self._all(to, frm):
            chain.add(self._lane, partial(self._world.all_gather_, out))
        else:
            super().gather(chain, out, frm, to)

    def reduce(self, chain: Chain, x: Tensor, frm: int, to: int) -> None:
        """Sum a level-``frm`` slice over the axes up to ``to``, into my level-``to`` slice."""
        if self._all(frm, to):
            chain.add(self._lane, partial(self._world.reduce_scatter_, x))
        else:
            super().reduce(chain, x, frm, to)

    def all_reduce(self, chain: Chain, x: Tensor, level: int, axes: Sequence[int]) -> Continuation:
        """Sum a slice over axes beyond its level."""
        if not self._all(level, axes[-1]):
            return super().all_reduce(chain, x, level, axes)
        chain.add(self._lane, partial(self._world.all_reduce_, x))
        return _nothing

    def _all(self, coarse: int, fine: int) -> bool:
        """Whether every rank of the world takes part, over more than one axis."""
        axes = self._active(coarse, fine)
        return len(axes) > 1 and math.prod(self.sizes[axis - 1] for axis in axes) == math.prod(self.sizes)
