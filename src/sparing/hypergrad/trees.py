"""Trees of tensors: any nesting of dicts, lists and tuples, and the flat vectors that stand for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# Tensors in any nesting of dicts, lists, tuples and named tuples.
Tree = Any


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return list(tree_flatten(tree)[0])


def rebuild(tree: Tree, tensors: Sequence[Tensor]) -> Tree:
    """A tree of the shape of ``tree`` that holds ``tensors``."""
    return tree_unflatten(list(tensors), tree_flatten(tree)[1])


def detach_tree(tree: Tree) -> Tree:
    """The same values without their history."""
    return tree_map(lambda leaf: materialize(leaf.detach()) if isinstance(leaf, Tensor) else leaf, tree)


def materialize(leaf: Tensor) -> Tensor:
    """The tensor with a place in memory for each element; that of ``expand`` has one for many, and no tangents."""
    return leaf.clone(memory_format=torch.contiguous_format) if 0 in leaf.stride() and leaf.numel() > 1 else leaf


def size(tree: Tree) -> int:
    """Number of elements of all leaves together (N of a φ, M of a θ)."""
    return sum(leaf.numel() for leaf in leaves(tree))


def bytes_of(tree: Tree) -> int:
    """Bytes of all leaves together."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def ravel(tree: Tree) -> Tensor:
    """All leaves, one after another, as one vector."""
    parts = leaves(tree)
    if not parts:
        return torch.zeros(0)
    wide = _widest(parts)
    return torch.cat([part.reshape(-1).to(wide) for part in parts])


def unravel(vector: Tensor, tree: Tree) -> Tree:
    """Cut a vector into the leaves of a tree; leading axes are kept."""
    parts = leaves(tree)
    ahead = vector.shape[:-1]
    cuts = torch.split(vector, [math.prod(part.shape) for part in parts], dim=-1)
    shaped = [cut.reshape((*ahead, *part.shape)).to(part.dtype) for cut, part in zip(cuts, parts, strict=True)]
    return rebuild(tree, shaped)


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum of products over all leaves, in the dtype of the leaves, shape ()."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def row_products(rows: Sequence[Tensor], vector: Sequence[Tensor]) -> Tensor:
    """Inner product of each row with one vector, over all leaves."""
    parts = [row.reshape(len(row), -1) @ leaf.reshape(-1).to(row.dtype) for row, leaf in zip(rows, vector, strict=True)]
    return torch.stack(parts).sum(0)


def add(a: Tree, b: Tree) -> Tree:
    """Leaf by leaf sum, in the shape and dtypes of ``a``."""
    pairs = zip(leaves(a), leaves(b), strict=True)
    return rebuild(a, [x + y.to(x.dtype) for x, y in pairs])


def _widest(parts: Sequence[Tensor]) -> torch.dtype:
    wide = parts[0].dtype
    for part in parts[1:]:
        wide = torch.promote_types(wide, part.dtype)
    return wide
