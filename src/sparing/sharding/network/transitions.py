"""Moving a tensor between levels: the only place that knows which collectives a pair of levels means.

A tensor at level l is the slice that is left after cutting the full one along the l innermost axes; slices nest, so a
collective over many axes is a chain of collectives over one, each inside the slice of the level below:

    gather  f -> t   axes f, f-1, …, t+1: all-gather
    reduce  N -> g   axes 1, 2, …, g: reduce-scatter; the sum is partial over the outer axes
    sync    f -> t   axes f+1, …, t: reduce-scatter; axes t+1, …, k: all-reduce, as reduce-scatters going out, an
                     all-reduce on the outermost and all-gathers coming back
    slice   f -> t   a view

Nothing here waits: parts are queued on the lanes of their axes at submit time, each blocking on the one before it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparing.errors import UserError, require
from sparing.sharding.network.lanes import Handle, Lane
from sparing.sharding.network.routes import Chain, Then, TwoLevel
from sparing.sharding.network.wires import Collectives


class Log:
    """How many collectives were submitted, and a number that their kinds, sizes and order make."""

    def __init__(self) -> None:
        self.length = self.digest = 0

    def add(self, kind: str, elements: int, frm: int, to: int) -> None:
        """Record one."""
        self.length += 1
        self.mark(f"{kind} {elements} {frm} {to}")

    def mark(self, what: str) -> None:
        """Say what the next ones belong to: those of two blocks may look the same."""
        self.digest = zlib.crc32(what.encode(), self.digest)


class Transitions:
    """Gathers, reductions and slices of flat tensors on one mesh.

    All ranks call the same methods in the same order from one thread. Lengths are those of ``Layout``: a full tensor is
    divisible by the world size. Tensors are contiguous and belong to the collective until its handle was waited for.
    ``slow`` replaces the collectives of the outermost axis.
    """

    def __init__(self, route: TwoLevel, lanes: Sequence[Lane]) -> None:
        self.sizes, self.coords = route.sizes, route.coords
        self._lanes, self._route = tuple(lanes), route
        self.tiers = len(self.sizes)
        self.log = Log()

    def gather_(
        self,
        out: Tensor,
        frm: int,
        to: int,
        *,
        after: Handle[Any] | None = None,
        then: Then | None = None,
        slow: Collectives | None = None,
    ) -> Handle[Tensor]:
        """Fill the level-``to`` slice ``out``, in which my level-``frm`` one is in place, from the other ranks."""
        self._check(out, to, frm)
        # Before anything is queued: ranks compare their logs to find who submitted something else.
        self.log.add("gather", out.numel(), frm, to)
        chain = Chain(self._lanes, out, after)
        self._over(slow).gather(chain, out, frm, to)
        return chain.finish(then)

    def reduce_step(
        self,
        full: Tensor,
        level: int,
        *,
        after: Handle[Any] | None = None,
        then: Then | None = None,
        slow: Collectives | None = None,
    ) -> Handle[Tensor]:
        """Sum a full tensor over the inner axes; the handle gives my slice, a view of ``full``, which is scratch then.

        Its sum is still partial over the axes beyond ``level``.
        """
        self.log.add("reduce", full.numel(), 0, level)
        chain = Chain(self._lanes, self.slice(full, 0, level), after)
        self._over(slow).reduce(chain, full, 0, level)
        return chain.finish(then)

    def sync(
        self,
        part: Tensor,
        frm: int,
        to: int,
        *,
        after: Handle[Any] | None = None,
        then: Then | None = None,
        slow: Collectives | None = None,
    ) -> Handle[Tensor]:
        """Complete a sum that is partial over the axes beyond level ``frm``; each rank keeps its level-``to`` slice.

        The handle gives a view of ``part``, which is scratch but for it; the same bits on all ranks that hold it.
        """
        return self.sync_out(part, frm, to, after=after, then=then, slow=slow)()

    def sync_out(
        self,
        part: Tensor,
        frm: int,
        to: int,
        *,
        after: Handle[Any] | None = None,
        then: Then | None = None,
        slow: Collectives | None = None,
    ) -> Callable[[], Handle[Tensor]]:
        """Begin ``sync`` with its reductions: gathers queued now would keep later reductions waiting on their lane.

        What it returns queues the rest; called once, on all ranks in the same order.
        """
        # rings cut even what is kept whole, up to the outermost axis
        self._check(part, frm, self.tiers)
        self.log.add("sync", part.numel(), frm, to)
        chain = Chain(self._lanes, self.slice(part, frm, to), after)
        finish_route = self._over(slow).sync(chain, part, frm, to)

        def finish() -> Handle[Tensor]:
            finish_route()
            return chain.finish(then)

        return finish

    def slice(self, x: Tensor, frm: int, to: int) -> Tensor:
        """This rank's finer slice, as a view."""
        self._check(x, frm, to)
        return self._route.slice(x, frm, to)

    def _over(self, slow: Collectives | None) -> TwoLevel:
        return self._route if slow is None else self._route.with_outermost(slow)

    def _check(self, x: Tensor, coarse: int, fine: int) -> None:
        legal = 0 <= coarse <= fine <= self.tiers
        require(legal, "levels", f"{coarse} and {fine}", f"0 <= coarser <= finer <= {self.tiers}", "swap or lower them")
        parts = math.prod(self.sizes[coarse:fine])
        if x.numel() % parts == 0:
            return
        raise UserError("tensor", got=f"{x.numel()} elements", why=f"{parts} ranks cut it", do="pad it as Layout says")
