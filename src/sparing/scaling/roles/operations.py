"""Operations of ATen by what they do to activations, and what their arguments say of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sparing.scaling.roles.trace import Operation, Ref, Trace

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "unsqueeze", "squeeze", "clone", "_to_copy", "alias", "detach",
    "contiguous", "unfold", "as_strided", "lift_fresh", "lift_fresh_copy", "repeat", "flatten", "roll", "flip",
    "repeat_interleave", "written", "copy", "native_dropout", "dropout", "resolve_conj", "resolve_neg",
})  # fmt: skip
# Degree one in what they take in, without a number of their own.
KEEPING = VIEWS | frozenset({
    "cat", "stack", "neg", "relu", "leaky_relu", "abs", "mean", "amax", "amin", "max", "min", "maximum", "minimum",
    "masked_fill", "where", "index", "gather", "index_select", "index_add", "index_put", "scatter", "cumsum",
    "constant_pad_nd", "reflection_pad1d", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d", "max_pool1d", "avg_pool1d", "upsample_nearest2d", "tril", "triu", "sort", "topk",
    "zeros_like", "new_zeros",
})  # fmt: skip
REDUCING = frozenset({"mean", "amax", "amin", "max", "min", "cumsum"})  # what they give is no longer one entry's
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "_grouped_mm", "addmv"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "_log_softmax"})
NORMS = frozenset({
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update", "_fused_rms_norm",
    "batch_norm", "instance_norm",
})  # fmt: skip
CHOICES = frozenset({"topk", "argmax", "sort"})


def slots(done: Operation) -> tuple[int, ...]:
    """Return what is multiplied by what, without the sum's other term; of a norm what it normalizes."""
    return done.operands[-2:] if done.name in {"addmm", "baddbmm", "addmv"} else done.operands[:2]


def number_at(done: Operation, at: int, trace: Trace) -> float | None:
    """Return an argument as a number, also where a tensor of one known value stands for it."""
    if at >= len(done.args):
        return None
    value = done.args[at]
    if isinstance(value, Ref):
        return trace.values.get(value.number)
    return float(value) if isinstance(value, int | float) else None


def axes_of(done: Operation, axes: tuple[int | None, ...] | None, trace: Trace) -> tuple[int | None, ...] | None:
    """Return which dimensions of a parameter the dimensions of a view of it are; None where it is not known."""
    if axes is None or len(done.results) < 1:
        return None
    count, name = len(axes), done.name
    where = [one if isinstance(one, int) else 0 for one in done.args[1:3]]
    if name == "t":
        return axes[::-1]
    if name == "transpose":
        a, b = (one % count for one in where)
        moved = list(axes)
        moved[a], moved[b] = moved[b], moved[a]
        return tuple(moved)
    if name == "permute":
        return tuple(axes[one] for one in done.args[1])
    if name in {"select", "unbind"}:
        drop = where[0] % count if where else 0
        return axes[:drop] + axes[drop + 1 :]
    if name == "unsqueeze":
        at = where[0] % (count + 1)
        return (*axes[:at], None, *axes[at:])
    before, after = (trace.shapes[number] for number in (done.operands[0], done.results[0]))
    if name == "index":  # along the first dimension
        return (*[None] * (len(after) - count + 1), *axes[1:])
    # A view keeps the order of entries, so that dimensions are the same from the last to the first that differs.
    same = 0
    while same < min(count, len(after)) and before[count - 1 - same] == after[len(after) - 1 - same]:
        same += 1
    if same < count and name not in {"view", "reshape", "_unsafe_view", "expand"}:
        return None
    return (*[None] * (len(after) - same), *axes[count - same :])


def contracted_axis(done: Operation, number: int, axes: tuple[int | None, ...] | None) -> int | None:
    """Return the dimension of a parameter that a product sums over."""
    if axes is None or done.name == "convolution" or len(axes) < 2:
        return None
    return axes[-1] if slots(done)[0] == number else axes[-2]


def rows_of(trace: Trace, start: int, span: tuple[int, int], side: int = 0) -> tuple[int, ...]:
    """Return which entries of the last dimension of a tensor become a side of a later product.

    Args:
        trace: The pass.
        start: Number of the tensor, what comes out of a packed projection.
        span: Indices of the operations that gave it and that multiply it.
        side: 0 for the left side of the product, 1 for the right.

    Returns:
        Ranges in order: start, stop, start, stop, …
    """
    shape = trace.shapes[start]
    indices = {start: torch.arange(shape[-1]).expand(shape)}

    def index(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return indices.get(leaf.number, torch.full(trace.shapes[leaf.number], -1))

    for at in range(span[0] + 1, span[1]):
        done = trace.operations[at]
        known = [number for number in done.operands if number in indices]
        if not known:
            continue
        if done.name in VIEWS | {"cat", "stack"}:
            # What changes the type of numbers would not leave them indices.
            options = {} if done.name in {"_to_copy", "written"} else dict(done.kwargs)
            given = done.call(*tree_map(index, done.args), **options)
            if done.name == "_to_copy":
                given = given.long()
            indices.update(zip(done.results, given if isinstance(given, list | tuple) else [given], strict=False))
        else:
            same = next((n for n in known if trace.shapes[n] == trace.shapes[done.results[0]]), None)
            if same is not None:
                indices[done.results[0]] = indices[same]
    found = indices.get(slots(trace.operations[span[1]])[side])
    live: list[int] = [] if found is None else [one for one in sorted(set(found.flatten().tolist())) if one >= 0]
    return tuple(_ranges(live))


def _ranges(numbers: list[int]) -> Iterator[int]:
    for at, number in enumerate(numbers):
        if at == 0 or numbers[at - 1] != number - 1:
            yield number
        if at == len(numbers) - 1 or numbers[at + 1] != number + 1:
            yield number + 1
