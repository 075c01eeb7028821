"""The protocol of a merge method: a function of the slices of one tensor, and so of tensors in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from sparing.valley.slices import Slices, merge_whole


class Method(Protocol):
    """A merge method: settings with a function of the tensors of one name.

    It works on slices, so that its copies are small and tensors may stay on disk; what it must know of a whole tensor,
    such as a threshold, takes an earlier pass. Your own method inherits from this or has the same three members.
    """

    __slots__ = ()

    @property
    def needs_base(self) -> bool:
        """Whether it merges changes since a common ancestor, as all do that start from task vectors."""
        return True

    @abstractmethod
    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name; yields slices in the dtype of the first model."""
        ...

    def tensor(self, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """Merge tensors in memory, one of each model; a new tensor in the dtype of the first."""
        return merge_whole(self.slices, name, tensors, base)
