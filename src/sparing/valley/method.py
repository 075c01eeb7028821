"""What a method of merging is: a function of the slices of one tensor, and so of tensors in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from sparing.valley.slices import Slices, merged_whole


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
        """Merge the tensors of one name in slices.

        Args:
            name: Canonical name.
            models: One tensor of each.
            base: That of the common ancestor.

        Yields:
            Merged slices in the dtype of the first.

        Raises:
            UserError: If the base is missing, or the weights are not as many as the models.
        """
        ...

    def tensor(self, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """Merge the tensors of one name.

        Args:
            name: Canonical name.
            tensors: One of each model, of equal shapes.
            base: The same tensor of the common ancestor.

        Returns:
            The merged tensor in the dtype of the first.

        Raises:
            UserError: As ``slices``.
        """
        return merged_whole(self.slices, name, tensors, base)
