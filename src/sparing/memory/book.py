"""The arithmetic of a ledger: bytes alive by category, now and at the peak. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.memory.sizes import CATEGORIES, Bytes, Category


@dataclass(slots=True)
class _Entry:
    """One live allocation."""

    nbytes: int
    category: Category
    born: int  # number of the allocation (count)


class Book:
    """Live allocations by key, their sums, and the composition at the instant of the largest sum.

    An allocation may learn its category late (a temporary of the backward pass turns out to be a gradient). ``move``
    therefore also corrects the composition at the peak if the allocation lived then.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Entry] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._events = 0
        self._unsettled = False
        self.reset_peak()

    def __contains__(self, key: int) -> bool:
        return key in self._live

    @property
    def now(self) -> Bytes:
        """Bytes alive at this moment."""
        return Bytes(**self._now)

    @property
    def peak(self) -> Bytes:
        """Bytes alive at the instant of the largest total since ``reset_peak``."""
        self.settle()
        return Bytes(**self._peak)

    def reset_peak(self) -> None:
        """Forget the peak: start again from what is alive."""
        self._unsettled = False
        self._record_peak()

    def allocate(self, key: int, nbytes: int, category: Category, *, settle: bool = True) -> None:
        """Enter an allocation; without ``settle`` it counts towards the peak only at the next ``settle()``."""
        # waiting lets an allocation that replaces another be counted after the other is freed
        self._events += 1
        self._live[key] = _Entry(nbytes, category, self._events)
        self._add(category, nbytes)
        self._unsettled = True
        if settle:
            self.settle()

    def resize(self, key: int, nbytes: int) -> None:
        """Give a living allocation another size (bytes)."""
        entry = self._live[key]
        if entry.nbytes != nbytes:
            # freed first, so that old and new size are never counted together
            self.free(key)
            self.allocate(key, nbytes, entry.category)

    def free(self, key: int) -> None:
        """Remove an allocation; an unknown one is ignored."""
        entry = self._live.pop(key, None)
        if entry is not None:
            self._add(entry.category, -entry.nbytes)

    def move(self, key: int, category: Category) -> None:
        """Give a living allocation its final category, now and at the peak; parameters stay parameters."""
        entry = self._live[key]
        if entry.category in {"params", category}:
            return
        # it lived at the peak if it was allocated before; what lives now was not freed since
        if entry.born <= self._peak_event:
            self._peak[entry.category] -= entry.nbytes
            self._peak[category] += entry.nbytes
        self._now[entry.category] -= entry.nbytes
        self._now[category] += entry.nbytes
        entry.category = category

    def settle(self) -> None:
        """Compare what is alive with the peak, if anything came since the last time."""
        if self._unsettled and self._total > self._peak_total:
            self._record_peak()
        self._unsettled = False

    def _add(self, category: Category, nbytes: int) -> None:
        self._now[category] += nbytes
        self._total += nbytes

    def _record_peak(self) -> None:
        self._peak_total, self._peak_event, self._peak = self._total, self._events, dict(self._now)
