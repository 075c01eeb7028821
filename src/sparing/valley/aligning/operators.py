"""What each operator of a traced net asks of the orders of its inputs, and the axes of what it returns.

Operators are ATen's, as ``torch.export`` records them. One that is not here may take pinned axes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from sparing.valley.aligning.axes import (
    Axis,
    Leaf,
    Product,
    Sequel,
    is_pinned,
    pin,
    pinned,
    reshape,
    unite,
)

Axes = list[Axis]  # of one tensor, a dimension each

# (arguments by name, a tensor's being its Axes; shape of the result) -> axes of the result
Rule = Callable[[Mapping[str, Any], tuple[int, ...]], Axes | list[Axes]]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE: Final = _words(
    """
    abs add alias alpha_dropout atan bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max clamp_min clone
    contiguous copy cos detach div dropout elu eq erf exp expm1 feature_dropout floor ge gelu gt hardsigmoid hardswish
    hardtanh lerp le leaky_relu lift_fresh_copy log log1p log_sigmoid logical_and logical_not logical_or lt masked_fill
    maximum minimum mish mul ne neg pow prelu reciprocal relu relu6 rsqrt rsub selu sigmoid sign silu sin softplus
    softsign sqrt square sub tan tanh threshold to _to_copy type_as where zeros_like ones_like full_like __and__ __or__
    empty_like
    """
)

# what treats all elements of a dimension alike and returns one for all of them
REDUCTIONS: Final = _words("mean sum amax amin var std logsumexp linalg_vector_norm any all prod")

NORMALISING: Final = _words("softmax _softmax log_softmax _log_softmax")

# windows over pixels; the leading dimensions, rows and channels, are treated one by one
POOLING: Final = _words(
    """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d
    """
)

SAME: Final = _words("_assert_tensor_metadata")


def tensors_in(value: Any) -> list[Axes]:
    """All tensors among arguments, by their axes."""
    if isinstance(value, TensorAxes):
        return [value.axes]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [axes for one in value for axes in tensors_in(one)]
    return []


class TensorAxes:
    """A tensor among the arguments of an operator."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        """Take the axes of its dimensions."""
        self.axes = list(axes)


def broadcast(tensors: Sequence[Axes]) -> Axes:
    """Unite dimensions from the right; one of size 1 goes with any."""
    found: Axes = []
    for dims in zip_longest(*(reversed(axes) for axes in tensors)):
        known = [axis for axis in dims if axis is not None]
        wide = [axis for axis in known if axis.size != 1]
        for axis in wide[1:]:
            unite(wide[0], axis)
        found.append(wide[0] if wide else known[0])
    return found[::-1]


def _at(dim: int, axes: Sequence[Axis]) -> int:
    return dim % len(axes) if axes else 0


def _linear(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x, weight = given["input"].axes, given["weight"].axes
    unite(x[-1], weight[1])
    if given.get("bias") is not None:
        unite(weight[0], given["bias"].axes[0])
    return [*x[:-1], weight[0]]


def matmul(a: Axes, b: Axes) -> Axes:
    """Contract the last axis of a with the last but one of b, or its only one; those before are broadcast."""
    unite(a[-1], b[-2] if len(b) > 1 else b[0])
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else []
    return [*broadcast([a[:-2], b[:-2]]), *rows, *columns]


def _matmul(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    first = given.get("self", given.get("input")).axes
    return matmul(first, given["mat2" if "mat2" in given else "other"].axes)


def _addmm(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    names = ("mat1", "mat2") if "mat1" in given else ("batch1", "batch2")
    return broadcast([given["self"].axes, matmul(given[names[0]].axes, given[names[1]].axes)])


def _convolution(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x, weight, groups = given["input"].axes, given["weight"].axes, given.get("groups", 1)
    channels = x[-len(weight) + 1]
    pin(*x[-len(weight) + 2 :], *weight[2:])
    if groups == 1:
        unite(channels, weight[1])
    else:  # groups go in any order as wholes; within them the inputs and the outputs do, alike in all groups
        group = Leaf(groups)
        unite(channels, Product((group, weight[1])))
        unite(weight[0], Product((group, Leaf(weight[0].size // groups))))
    if given.get("bias") is not None:
        unite(weight[0], given["bias"].axes[0])
    rows = x[: -len(weight) + 1]
    return [*rows, weight[0], *map(pinned, shape[len(rows) + 1 :])]


def _batch_norm(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["input"].axes
    for name in ("weight", "bias", "running_mean", "running_var"):
        if given.get(name) is not None:
            unite(x[1], given[name].axes[0])
    return list(x)


def _group_norm(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x, groups = given["input"].axes, given["num_groups"]
    unite(x[1], Product((Leaf(groups), Leaf(x[1].size // groups))))
    return _batch_norm(given, shape)


def _layer_norm(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["input"].axes
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            for mine, theirs in zip(x[-len(given["normalized_shape"]) :], given[name].axes, strict=True):
                unite(mine, theirs)
    return list(x)


def _embedding(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    weight = given["weight"].axes
    pin(weight[0])
    return [*given["indices"].axes, weight[1]]


def _attention(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    query, key, value = (given[name].axes for name in ("query", "key", "value"))
    # queries in groups of heads share a key's head
    if given.get("enable_gqa") and query[-3].size != key[-3].size:
        share = Product((key[-3], Leaf(query[-3].size // key[-3].size)))
        unite(query[-3], share)
        unite(key[-3], value[-3])
        key, value = [*key[:-3], query[-3], *key[-2:]], [*value[:-3], query[-3], *value[-2:]]
    unite(query[-1], key[-1])
    pin(query[-2], key[-2], value[-2])
    rows = broadcast([query[:-2], key[:-2], value[:-2]])
    if given.get("attn_mask") is not None:
        broadcast([[*rows, query[-2], key[-2]], given["attn_mask"].axes])
    return [*rows, query[-2], value[-1]]


def _reduction(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self" if "self" in given else "input"].axes
    dims = given.get("dim")
    chosen = range(len(x)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {_at(dim, x) for dim in chosen}
    if given.get("keepdim"):
        return [pinned(1) if at in gone else axis for at, axis in enumerate(x)]
    return [axis for at, axis in enumerate(x) if at not in gone]


def _reshape(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    return reshape(given["self"].axes, shape)


def _permute(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self"].axes
    return [x[_at(dim, x)] for dim in given["dims"]]


def _transpose(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = list(given["self"].axes)
    i, j = _at(given.get("dim0", 0), x), _at(given.get("dim1", 1), x)
    if len(x) > 1:
        x[i], x[j] = x[j], x[i]
    return x


def _expand(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self"].axes
    # copies of one element are alike, so they go in any order
    old: Axes = [pinned(1)] * (len(shape) - len(x)) + list(x)
    return [axis if axis.size == size else Leaf(size) for axis, size in zip(old, shape, strict=True)]


def _repeat(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self"].axes
    old: Axes = [pinned(1)] * (len(shape) - len(x)) + list(x)
    return [
        axis if axis.size == size else Product((Leaf(size // max(axis.size, 1)), axis))
        for axis, size in zip(old, shape, strict=True)
    ]


def _slice(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = list(given["self"].axes)
    dim = _at(given.get("dim", 0), x)
    size, start = x[dim].size, given.get("start") or 0
    start = min(start + size if start < 0 else start, size)
    if shape[dim] == size:
        return x
    if given.get("step", 1) != 1:
        pin(x[dim])
        x[dim] = pinned(shape[dim])
    else:
        x[dim] = pieces(x[dim], [start, shape[dim], size - start - shape[dim]])[1]
    return x


def pieces(axis: Axis, sizes: Sequence[int]) -> Axes:
    """Cut an axis into pieces that follow each other."""
    if is_pinned(axis):
        return [pinned(size) for size in sizes]
    parts: Axes = [Leaf(size) for size in sizes]
    unite(axis, Sequel(tuple(parts)))
    return parts if not is_pinned(axis) else [pinned(size) for size in sizes]


def _select(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = list(given["self"].axes)
    pin(x.pop(_at(given["dim"], x)))
    return x


def _split(given: Mapping[str, Any], shape: tuple[int, ...]) -> list[Axes]:
    x = given["self"].axes
    dim = _at(given.get("dim", 0), x)
    total = x[dim].size
    sizes = given.get("split_sizes", given.get("split_size"))
    if "chunks" in given:
        sizes = -(-total // given["chunks"])
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    return [[*x[:dim], piece, *x[dim + 1 :]] for piece in pieces(x[dim], sizes)]


def _cat(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    tensors = [one.axes for one in given["tensors"] if len(one.axes) == len(shape)]
    dim = _at(given.get("dim", 0), tensors[0])
    others = broadcast([[*x[:dim], pinned(1), *x[dim + 1 :]] for x in tensors])
    others[dim] = Sequel(tuple(x[dim] for x in tensors))
    return others


def _stack(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    found = broadcast([one.axes for one in given["tensors"]])
    dim = given.get("dim", 0) % len(shape)
    return [*found[:dim], pinned(shape[dim]), *found[dim:]]


def _pad(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = list(given["self"].axes)
    for at, (before, after) in enumerate(zip(given["pad"][::2], given["pad"][1::2], strict=True), start=1):
        axis = x[-at]
        if before == after == 0:
            continue
        if is_pinned(axis) or min(before, after) < 0 or given.get("mode", "constant") != "constant":
            pin(axis)
            x[-at] = pinned(shape[-at])
        else:  # equal numbers go in any order
            x[-at] = Sequel((Leaf(before), axis, Leaf(after)))
    return x


def _pooling(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self" if "self" in given else "input"].axes
    kept = [axis for axis, size in zip(x[:2], shape[:2], strict=True) if axis.size == size]
    pin(*x[len(kept) :])
    return [*kept, *map(pinned, shape[len(kept) :])]


def _squeeze(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = given["self"].axes
    dims = given.get("dim")
    chosen = range(len(x)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {_at(dim, x) for dim in chosen}
    return [axis for at, axis in enumerate(x) if at not in gone or axis.size != 1]


def _unsqueeze(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x = list(given["self"].axes)
    x.insert(given["dim"] % len(shape), pinned(1))
    return x


def _elementwise(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    return broadcast(tensors_in(given))


def _prelu(given: Mapping[str, Any], shape: tuple[int, ...]) -> Axes:
    x, weight = given["self"].axes, given["weight"].axes
    if weight and weight[0].size > 1:
        unite(x[1], weight[0])
    return list(x)


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(NORMALISING, lambda given, shape: list(tensors_in(given)[0])),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(POOLING, _pooling),
    **dict.fromkeys(SAME, lambda given, shape: []),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("batch_norm", "instance_norm"), _batch_norm),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "linear": _linear, "group_norm": _group_norm, "embedding": _embedding, "prelu": _prelu,
    "scaled_dot_product_attention": _attention, "permute": _permute, "expand": _expand, "repeat": _repeat,
    "slice": _slice, "select": _select, "cat": _cat, "stack": _stack, "squeeze": _squeeze, "unsqueeze": _unsqueeze,
}  # fmt: skip

# what gives a unit its answer; it says more of what a unit does than the sum before it
ANSWERING: Final = _words(
    "relu relu6 gelu silu tanh sigmoid elu leaky_relu selu celu hardswish hardsigmoid mish softplus prelu"
)

# what mixes units into new ones, for those that pass no such function, as a residual stream does
MIXING: Final = _words("linear conv1d conv2d conv3d matmul mm bmm addmm baddbmm embedding add")
