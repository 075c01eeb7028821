"""What a merge method is: a function of the slices of one tensor, and so of tensors in memory and on disk.

A method makes dozens of temporaries. Of whole tensors they would take many times the largest; of slices they fit into a
processor's cache. A tensor in memory is cut exactly as one on disk, so that both give the same bits: vector units round
the last few numbers of an array by other instructions than the rest.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sparing.errors import require

T = TypeVar("T")

# numbers in a slice at most (count): 128 KiB in float32. On one core half as many are slower, more are no faster.
SLICE = 1 << 15


@dataclass(frozen=True, slots=True)
class Slices:
    """A flat tensor in slices of ``slice_lengths``, read anew by each call.

    It keeps no slice alive, so a method may read as often as it needs: once for a threshold of the whole tensor, once
    to merge.
    """

    read: Callable[[], Iterator[Tensor]]
    shape: tuple[int, ...]  # of the whole tensor

    def __call__(self) -> Iterator[Tensor]:
        """Read from the start."""
        return self.read()

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def slice_lengths(count: int) -> list[int]:
    """Return the lengths of the slices of a tensor of ``count`` numbers, at least one.

    They differ by one at most: where there are several, none is as short as a scalar.

    Example:
        >>> slice_lengths(SLICE + 1)
        [16385, 16384]
    """
    parts = max(1, math.ceil(count / SLICE))
    return [count // parts + (at < count % parts) for at in range(parts)]


def slices_of(tensor: Tensor) -> Slices:
    """Return the slices of a tensor in memory, flat: views where it is contiguous."""
    lengths = slice_lengths(tensor.numel())
    return Slices(lambda: iter(torch.split(tensor.reshape(-1), lengths)), tuple(tensor.shape))


def recut(pieces: Iterable[Tensor], lengths: Iterable[int]) -> Iterator[Tensor]:
    """Cut a flat tensor, given in pieces of any lengths, into pieces of these lengths."""
    source, held = iter(pieces), torch.empty(0)
    for length in lengths:
        parts = [held] if len(held) else []
        have = len(held)
        while have < length or not parts:
            parts.append(next(source))
            have += len(parts[-1])
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        yield whole[:length]
        held = whole[length:]


def read_rows(source: Slices, width: int) -> Iterator[Tensor]:
    """Read whole rows of ``width`` numbers, about a slice of them at a time; shape (rows, width)."""
    return cut_rows(source(), source.count, width)


def cut_rows(pieces: Iterator[Tensor], count: int, width: int) -> Iterator[Tensor]:
    """Cut ``count`` numbers into whole rows of ``width``, about a slice of them at a time; shape (rows, width)."""
    rows, at_once = count // width if width else 0, max(1, SLICE // max(1, width))
    lengths = [min(at_once, rows - start) * width for start in range(0, rows, at_once)]
    return (piece.view(-1, width) for piece in recut(pieces, lengths))


def zip_slices(sources: Iterable[Slices]) -> Iterator[tuple[Tensor, ...]]:
    """Read several tensors of one size in lockstep."""
    return zip(*(source() for source in sources), strict=True)


def branch(source: Iterator[T], count: int) -> list[Iterator[T]]:
    """Return iterators over one source that advance together; what all have had is let go.

    ``itertools.tee`` does the same but lets go of 57 items at once, dozens of MiB of slices.
    """
    queues: list[collections.deque[T]] = [collections.deque() for _ in range(count)]

    def read(mine: collections.deque[T]) -> Iterator[T]:
        while True:
            if not mine:
                try:
                    item = next(source)
                except StopIteration:
                    return
                for queue in queues:
                    queue.append(item)
                del item
            yield mine.popleft()

    return [read(queue) for queue in queues]


def join_slices(pieces: Iterable[Tensor], like: Tensor) -> Tensor:
    """Join merged slices to a new tensor with the shape, dtype and device of ``like``."""
    merged = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    join_into(merged.view(-1), pieces)
    return merged


def join_into(flat: Tensor, pieces: Iterable[Tensor]) -> None:
    """Fill a flat tensor with pieces, one behind the other."""
    at = 0
    for piece in pieces:
        flat[at : at + len(piece)] = piece
        at += len(piece)


# the function ``slices`` of a method: name, models and base to merged slices
Merging = Callable[[str, Sequence[Slices], Slices | None], Iterable[Tensor]]


def merge_whole(merging: Merging, name: str, tensors: Sequence[Tensor], base: Tensor | None) -> Tensor:
    """Merge tensors in memory, one of each model, by a function of slices."""
    origin = None if base is None else slices_of(base)
    return join_slices(merging(name, [slices_of(tensor) for tensor in tensors], origin), tensors[0])


class Method(Protocol):
    """A merge method: settings with a function of the tensors of one name.

    It works on slices, so that its copies are small and tensors may stay on disk; what it must know of a whole tensor,
    such as a threshold, takes an earlier pass. Your own method is a frozen dataclass that inherits from this and has
    ``slices``; one that starts from task vectors inherits from ``TaskVectorMethod`` and has ``_rule``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Median(Method):
        ...     needs_base = False
        ...     def slices(self, name, models, base=None):
        ...         for parts in zip_slices(models):
        ...             yield torch.stack(parts).median(0).values
        >>> Median().tensor("w", [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([9.0])])
        tensor([2.])
    """

    __slots__ = ()

    @property
    def needs_base(self) -> bool:
        """Whether it merges changes since a common ancestor, as all do that start from task vectors."""
        return True

    def ready(self, models: Sequence[Mapping[str, Slices]], base: Mapping[str, Slices] | None) -> Method:
        """Read what must be known of whole models, and return the method that knows it; itself where nothing is."""
        return self

    @abstractmethod
    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name; yields slices in the dtype of the first model."""
        ...

    def tensor(self, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """Merge tensors in memory, one of each model; a new tensor in the dtype of the first."""
        return merge_whole(self.slices, name, tensors, base)


# Slices of the task vectors, one of each model, and that of the base -> what is added to that slice of the base
Rule = Callable[[Sequence[Tensor], Tensor], Tensor]


# A task vector, slice by slice -> the same, changed
Change = Callable[[Iterator[Tensor]], Iterator[Tensor]]


def changed(delta: Slices, change: Change) -> Slices:
    """Return what reads a task vector and changes it."""
    return Slices(lambda: change(delta()), delta.shape)


class TaskVectorMethod(Method, Protocol):
    """A method that adds to the base what it makes of the task vectors τ_t = θ_t − θ₀."""

    __slots__ = ()

    def _changes(self, name: str, deltas: Sequence[Slices]) -> Sequence[Change]:
        """What changes each task vector of a name before they are merged, found by reading them."""
        return [iter] * len(deltas)

    @abstractmethod
    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        """Read the task vectors of a name as a whole where that is needed, and return how their slices are merged."""
        ...

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        deltas = task_vectors(name, models, base)
        changes = self._changes(name, deltas)
        rule = self._rule(name, [changed(delta, change) for delta, change in zip(deltas, changes, strict=True)])
        origin_slices = require_origin(name, base)
        # Base and models are read once for all task vectors, which advance together
        read, *branches = branch(zip_slices([origin_slices, *models]), 1 + len(models))
        pairs = [map(operator.itemgetter(at, 0), one) for at, one in enumerate(branches, 1)]
        streams = [change(itertools.starmap(difference, each)) for change, each in zip(changes, pairs, strict=True)]
        for (origin, first, *_), *parts in zip(read, *streams, strict=True):
            delta = rule(parts, origin)
            yield (origin.to(delta) + delta).to(first.dtype)


def task_vectors(name: str, models: Sequence[Slices], base: Slices | None) -> list[Slices]:
    """Return τ_t = θ_t − θ₀ in float32, or float64 where the models are."""
    origin = require_origin(name, base)

    def task_vector(model: Slices) -> Slices:
        return Slices(lambda: itertools.starmap(difference, zip_slices([model, origin])), model.shape)

    return [task_vector(model) for model in models]


def require_origin(name: str, base: Slices | None) -> Slices:
    """Return the base; refuse to go on without."""
    require(base is not None, f"base at {name!r}", "none", "this method merges what was learned since", "pass base=...")
    assert base is not None
    return base


def difference(part: Tensor, origin: Tensor) -> Tensor:
    """A slice of a task vector."""
    mine = upcast(part, origin)
    return mine - origin.to(mine)


def upcast(tensor: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return a tensor in the dtype of the arithmetic: float32, or float64 if it or ``beside`` is."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(dtype) if beside is None else tensor.to(beside.device, torch.promote_types(dtype, beside.dtype))


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_t x_t, a new tensor in the dtype of the first."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part.to(total), alpha=weight)
    return total


def weights_for(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    """Return one weight for each of ``count`` models, 1 by default; refuse another number of them."""
    if weights is None:
        return [1.0] * count
    why = f"{count} models need as many weights"
    require(len(weights) == count, "weights", f"{len(weights)} of them", why, "pass one for each model, in order")
    return weights


# A setting of all models, or one for each in their order
PerModel = float | tuple[float, ...]


def each_model(value: PerModel) -> tuple[float, ...]:
    """The values of a setting, of which there may be one for all models."""
    return value if isinstance(value, tuple) else (value,)


def for_models(name: str, value: PerModel, count: int) -> tuple[float, ...]:
    """Return one value for each of ``count`` models; refuse another number of them."""
    if not isinstance(value, tuple):
        return (value,) * count
    why = f"{count} models need as many"
    require(len(value) == count, name, f"{len(value)} of them", why, "pass one number, or one for each model in order")
    return value


def check_settings(*, weights: Sequence[float] | None = None, scale: float = 1.0, keep: PerModel = 1.0) -> None:
    """Refuse a share to keep outside (0, 1], a scale that is not finite, and weights without a mean."""
    shares = all(0 < share <= 1 for share in each_model(keep))
    require(shares, "keep", keep, "it is a share of the elements", "pass 0 < keep <= 1, such as 0.2")
    require(math.isfinite(scale), "scale", scale, "task vectors are multiplied by it", "pass a finite number")
    if weights is not None:
        fine = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
        why = "a mean needs finite weights ≥ 0 of which one is positive"
        require(fine, "weights", tuple(weights), why, "pass numbers such as (0.5, 0.5)")


def check_finite(weights: Sequence[float] | None) -> None:
    """Refuse weights that are not finite."""
    fine = all(map(math.isfinite, weights or ()))
    require(fine, "weights", weights, "models are multiplied by them", "pass finite numbers")
