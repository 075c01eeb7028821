"""Tensors in slices, so that the temporaries of a merge take almost no memory, whatever the size of the tensors.

A method makes dozens of temporaries. Of whole tensors they would take many times the largest; of slices they fit into a
processor's cache. A tensor in memory is cut exactly as one on disk, so that both give the same bits: vector units round
the last few numbers of an array by other instructions than the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

# numbers in a slice at most (count): 128 KiB in float32. On one core half as many are slower, more are no faster.
SLICE = 1 << 15

# A flat tensor in slices of ``slice_lengths``. Each call starts over and keeps no slice alive, so a method may read as
# often as it needs: once for a threshold of the whole tensor, once to merge.
Slices = Callable[[], Iterator[Tensor]]


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
    return lambda: iter(torch.split(tensor.reshape(-1), slice_lengths(tensor.numel())))


def zip_slices(sources: Iterable[Slices]) -> Iterator[tuple[Tensor, ...]]:
    """Read several tensors of one size in lockstep."""
    return zip(*(source() for source in sources), strict=True)


def join_slices(pieces: Iterable[Tensor], like: Tensor) -> Tensor:
    """Join merged slices to a new tensor with the shape, dtype and device of ``like``."""
    merged = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    flat, at = merged.view(-1), 0
    for piece in pieces:
        flat[at : at + len(piece)] = piece
        at += len(piece)
    return merged


# the function ``slices`` of a method: name, models and base to merged slices
Merging = Callable[[str, Sequence[Slices], Slices | None], Iterable[Tensor]]


def merge_whole(merging: Merging, name: str, tensors: Sequence[Tensor], base: Tensor | None) -> Tensor:
    """Merge tensors in memory, one of each model, by a function of slices."""
    origin = None if base is None else slices_of(base)
    return join_slices(merging(name, [slices_of(tensor) for tensor in tensors], origin), tensors[0])
