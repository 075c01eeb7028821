"""What a method of merging is: a function of the slices of one tensor, and so of tensors in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from sparing.valley.slices import Slices, merge_whole


class Method(Protocol):
    """A way to merge: settings with a function of the tensors of one name.

    It works on slices, so that its copies are small and tensors may stay on disk. Most numbers of a result depend on
    the same numbers of the models alone; what else a method must know, such as a threshold, it takes from an earlier
    reading. A method of one's own inherits from this, or has the same three members.
    """

    __slots__ = ()

    @property
    def needs_base(self) -> bool:
        """Whether it merges changes since a common ancestor, as all do that begin with task vectors."""
        return True

    @abstractmethod
    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        ...

    def tensor(self, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """Merge the tensors of one name."""
        return merge_whole(self.slices, name, tensors, base)
