"""Trees of tensors: any nesting of dicts, lists and tuples, and the flat vectors that stand for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Tree = Any  # tensors in any nesting of dicts, lists, tuples and named tuples


def leaves(tree: Tree) -> list[Tensor]:
    """Tensors of a tree, in its order."""
    return list(tree_flatten(tree)[0])


def rebuild(tree: Tree, tensors: Sequence[Tensor]) -> Tree:
    """A tree of the shape of ``tree`` that holds ``tensors``."""
    return tree_unflatten(list(tensors), tree_flatten(tree)[1])


def detach_tree(tree: Tree) -> Tree:
    """The same values without their history."""
    return tree_map(lambda leaf: materialize(leaf.detach()) if isinstance(leaf, Tensor) else leaf, tree)


def differentiable(tree: Tree) -> list[Tensor]:
    """Detached leaves that require gradients."""
    return [leaf.detach().requires_grad_() for leaf in leaves(tree)]


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros in the shapes and dtypes of another."""
    return tree_map(torch.zeros_like, tree)


def materialize(leaf: Tensor) -> Tensor:
    """The tensor with its own memory for each element."""
    # forward mode cannot give a tangent to the result of ``expand``, whose elements share memory
    shared = isinstance(leaf, Tensor) and 0 in leaf.stride() and leaf.numel() > 1
    return leaf.clone(memory_format=torch.contiguous_format) if shared else leaf


def sum_dtype(leaf: Tensor) -> torch.dtype:
    """In which parts of many steps add up: bfloat16 would stop counting at 256."""
    return leaf.dtype if leaf.dtype.itemsize >= 4 else torch.float32


def size(tree: Tree) -> int:
    """Number of elements of all leaves together (N of a φ, M of a θ)."""
    return sum(leaf.numel() for leaf in leaves(tree))


def bytes_of(tree: Tree) -> int:
    """Bytes of all leaves together."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def ravel(tree: Tree) -> Tensor:
    """All leaves as one vector of shape (size,), in the widest of their dtypes."""
    parts = leaves(tree)
    if not parts:
        return torch.zeros(0)
    wide = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.cat([part.reshape(-1).to(wide) for part in parts])


def unravel(vector: Tensor, tree: Tree) -> Tree:
    """The inverse of ``ravel``: (..., size) -> leaves of shape (..., *leaf) in the dtypes of ``tree``."""
    parts = leaves(tree)
    ahead = vector.shape[:-1]
    cuts = torch.split(vector, [math.prod(part.shape) for part in parts], dim=-1)
    shaped = [cut.reshape((*ahead, *part.shape)).to(part.dtype) for cut, part in zip(cuts, parts, strict=True)]
    return rebuild(tree, shaped)


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Sum of products over all leaves, in the dtype of the leaves, shape ()."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def row_products(rows: Sequence[Tensor], vector: Sequence[Tensor]) -> Tensor:
    """Inner products of rows, leaves of shape (b, *leaf), with one vector, leaves of shape (*leaf); shape (b,)."""
    parts = [row.reshape(len(row), -1) @ leaf.reshape(-1).to(row.dtype) for row, leaf in zip(rows, vector, strict=True)]
    return torch.stack(parts).sum(0)


def add(a: Tree, b: Tree) -> Tree:
    """Leaf by leaf sum, in the shape and dtypes of ``a``."""
    pairs = zip(leaves(a), leaves(b), strict=True)
    return rebuild(a, [x + y.to(x.dtype) for x, y in pairs])
