"""Tensors in slices, so that what a merge makes of them takes no memory to speak of, whatever their size.

A method compares several models, and makes copies by the dozen while it does. Of whole tensors they would take many
times the largest; of slices they fit into a processor's cache. So every method works on slices, and a tensor in memory
is cut exactly as one on disk: results are the same to the bit on any machine, although vector units round the last few
numbers of an array by other instructions than the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

SLICE = 1 << 15
"""Numbers in a slice at most (count): 128 KiB in float32. On one core half as many are slower, more are no faster."""

Slices = Callable[[], Iterator[Tensor]]
"""A tensor, flat, in slices of ``lengths``: each call begins anew, and nothing holds a slice that was read before. A
method may read as often as it needs, such as once for a threshold of the whole tensor and once to merge."""


def lengths(count: int) -> list[int]:
    """Return the lengths of the slices of a tensor, at least one.

    They differ by one at most: where there are several, none is so short that it looks like a scalar.

    Args:
        count: Its numbers.

    Returns:
        Numbers in each slice; their sum is ``count``.

    Example:
        >>> lengths(SLICE + 1)
        [16385, 16384]
    """
    parts = max(1, math.ceil(count / SLICE))
    return [count // parts + (at < count % parts) for at in range(parts)]


def slices_of(tensor: Tensor) -> Slices:
    """Return the slices of a tensor in memory: views, where it is contiguous.

    Args:
        tensor: Any shape.

    Returns:
        Its slices, flat.
    """
    return lambda: iter(torch.split(tensor.reshape(-1), lengths(tensor.numel())))


def together(sources: Iterable[Slices]) -> Iterator[tuple[Tensor, ...]]:
    """Read several tensors of one size in step.

    Args:
        sources: At least one.

    Returns:
        Of each a slice, of one length, again and again.
    """
    return zip(*(source() for source in sources), strict=True)


def joined(pieces: Iterable[Tensor], like: Tensor) -> Tensor:
    """Put merged slices together.

    Args:
        pieces: All slices, in order.
        like: A tensor with the shape, dtype and device of the answer.

    Returns:
        A new tensor.
    """
    merged = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    flat, at = merged.view(-1), 0
    for piece in pieces:
        flat[at : at + len(piece)] = piece
        at += len(piece)
    return merged


Merging = Callable[[str, Sequence[Slices], Slices | None], Iterable[Tensor]]
"""The function ``slices`` of a method: name, models and base to merged slices."""


def merged_whole(merging: Merging, name: str, tensors: Sequence[Tensor], base: Tensor | None) -> Tensor:
    """Merge tensors in memory by a method of slices.

    Args:
        merging: The method's function.
        name: Their name.
        tensors: One of each model, of equal shapes.
        base: The same tensor of the common ancestor.

    Returns:
        A new tensor in the shape, dtype and device of the first.
    """
    origin = None if base is None else slices_of(base)
    return joined(merging(name, [slices_of(tensor) for tensor in tensors], origin), tensors[0])
