"""Derivatives along directions by two backward passes, which take less time and memory than torch.func's layers.

Both return None where autograd does not give the derivative, and ``batched_jvp`` is to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparing.hypergrad.inner.unroll import Unroll
from sparing.hypergrad.trees import Tree, differentiable, leaves, rebuild


def gradient_along(
    unroll: Unroll, batch: Any, theta: Sequence[Tensor], psi: Tree, rows_theta: Sequence[Tensor], rows_psi: Tree
) -> tuple[list[Tensor], Tensor, list[Tensor]] | None:
    """∇_θ g, g, and H·y + J·v for each row, leaves (b, *leaf): one backward pass through that to (θ, ψ).

    Second derivatives are symmetric, so the product with (y, v) from the left is that from the right.
    """
    weights, inputs = differentiable(theta), differentiable(psi)
    try:
        with torch.enable_grad():
            loss = unroll.loss(weights, rebuild(psi, inputs), batch)
            if not torchs_own([loss]):
                return None
            slopes = torch.autograd.grad(loss, [*weights, *inputs], create_graph=True, allow_unused=True)
            moved = _rows_back(slopes, weights, [*rows_theta, *leaves(rows_psi)])
    except RuntimeError:  # no second derivative, or none that takes many directions at once
        return None
    grads = [
        torch.zeros_like(weight) if slope is None else slope.detach()
        for weight, slope in zip(weights, slopes, strict=False)
    ]
    return grads, loss.detach(), moved


def along(function: Callable[..., Any], primals: tuple[Any, ...], rows: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """A function's value and derivatives along rows, leaves (b, *leaf).

    The backward pass is linear in its cotangent u, so its own derivative with respect to u is the product sought.
    """
    inputs = differentiable(primals)
    try:
        with torch.enable_grad():
            value = function(*rebuild(primals, inputs))
            flat, shape = tree_flatten(value)
            moving = [leaf for leaf in flat if leaf.requires_grad]
            if not torchs_own(moving):
                return None
            cotangents = [torch.ones_like(leaf, requires_grad=True) for leaf in moving]
            back: Sequence[Tensor | None] = []
            if moving:
                back = torch.autograd.grad(moving, inputs, cotangents, create_graph=True, allow_unused=True)
            found = iter(_rows_back(back, cotangents, leaves(rows)))
    except RuntimeError:
        return None
    count = len(leaves(rows)[0])
    moved = [next(found) if leaf.requires_grad else leaf.new_zeros(count, *leaf.shape) for leaf in flat]
    return tree_unflatten([leaf.detach() for leaf in flat], shape), tree_unflatten(moved, shape)


def _rows_back(outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Pull many cotangents back at once, leaves (b, *leaf); zero where no path leads."""
    count = len(rows[0])
    joined = zip(outputs, rows, strict=False)
    kept = [(out, row) for out, row in joined if out is not None and out.requires_grad]
    got: Sequence[Tensor | None] = [None] * len(inputs)
    if kept:
        outs, cotangents = zip(*kept, strict=True)
        got = torch.autograd.grad(outs, inputs, cotangents, allow_unused=True, is_grads_batched=True)
    return [leaf.new_zeros(count, *leaf.shape) if one is None else one for leaf, one in zip(inputs, got, strict=True)]


def torchs_own(ends: Sequence[Tensor]) -> bool:
    """Whether every derivative in a graph is torch's: slopes that a user wrote need not be those of a function."""
    # torch also takes the second derivative of a Function marked once_differentiable for zero, without a word
    seen: set[Any] = set()
    stack = [end.grad_fn for end in ends]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction) or "CppNode" in node.name():
            return False
        seen.add(node)
        stack.extend(edge for edge, _ in node.next_functions)
    return True
