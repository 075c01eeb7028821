"""What a net's forward does between its layers, on stacked activations: sums, pooling, means, flattening.

An activation is (clients, rows, ...), or has the channels of all clients side by side: (rows, clients · channels, ...).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparing.federated.methods.interface import Vector

POINTWISE: Final = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU)
_MAX_POOLS: Final = (nn.MaxPool1d, nn.MaxPool2d)
POOLS: Final = (*_MAX_POOLS, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)

_RELUS: Final = (F.relu, torch.relu, "relu")
_MAX_POOL_CALLS: Final = (F.max_pool1d, F.max_pool2d, torch.max_pool1d, torch.max_pool2d)
_POOL_CALLS: Final = (*_MAX_POOL_CALLS, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
_POINTWISE_CALLS: Final = (*_RELUS, torch.tanh, "tanh", torch.sigmoid, "sigmoid", F.silu)
_ADDS: Final = (operator.add, operator.iadd, torch.add, "add", "add_")
# They give what they took, or a view of it: what is then changed in place is changed for others too.
_VIEWS: Final = (nn.Flatten, nn.Identity)
_VIEW_CALLS: Final = (torch.flatten, "flatten", "view", "reshape")
_METHODS: Final = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


class NotStackableError(Exception):
    """A net that is not made of known layers; the text says why."""


@dataclass(frozen=True, slots=True)
class Value:
    """An activation."""

    tensor: Tensor
    side: bool = False  # (rows, clients · channels, ...); otherwise (clients, rows, ...)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass through a net is given."""

    clients: int
    params: Vector  # by canonical name, stacked; those that are missing are the model's own
    buffers: Vector  # by name, stacked; running statistics are changed in place
    real: Tensor | None  # (clients, rows), bool: False where a short batch was padded; None where none was

    def beside(self, value: Value) -> Tensor:
        """Return channels of all clients side by side, channels last in memory."""
        if value.side:
            return value.tensor
        axes = range(3, value.tensor.ndim)
        return value.tensor.permute(1, *axes, 0, 2).flatten(-2).contiguous().movedim(-1, 1)

    def apart(self, value: Value) -> Tensor:
        """Return (clients, rows, ...)."""
        rows = value.tensor
        return rows.view(len(rows), self.clients, -1, *rows.shape[2:]).movedim(1, 0) if value.side else rows


Step = Callable[[Pass, Sequence[Any]], Any]
"""Arguments of a node of the graph -> its value."""


def refuse_shared(node: fx.Node, model: nn.Module) -> None:
    """Refuse a change in place of what somebody else reads too: here nothing is changed in place."""
    source = node.args[0]
    shared = not isinstance(source, fx.Node) or len(source.users) > 1 or source.op == "placeholder"
    if shared or _is(source, model, _VIEWS, _VIEW_CALLS):
        raise NotStackableError(f"{node.name} changes in place what may be read elsewhere")


def pool_before_relu_(graph: fx.Graph, model: nn.Module) -> None:
    """Put pooling by the maximum before the ReLU that it follows.

    Exact: the largest of max(x, 0) is the maximum of 0 and the largest x; where that is positive both choose the same
    place for the gradient, and elsewhere ReLU lets none through.
    """
    for pool in list(graph.nodes):
        if not (_is(pool, model, _MAX_POOLS, _MAX_POOL_CALLS) and pool.args and _is_plain_relu(pool.args[0], model)):
            continue
        relu = pool.args[0]
        users = list(pool.users)
        pool.replace_input_with(relu, relu.args[0])
        pool.append(relu)
        relu.replace_input_with(relu.args[0], pool)
        for user in users:
            user.replace_input_with(pool, relu)


def _is_plain_relu(node: Any, model: nn.Module) -> bool:
    """Whether a node is a ReLU that only one other reads, and that changes nothing in place."""
    if not (_is(node, model, (nn.ReLU,), _RELUS) and len(node.users) == 1 and isinstance(node.args[0], fx.Node)):
        return False
    if node.op == "call_module":
        return not model.get_submodule(str(node.target)).inplace or len(node.args[0].users) == 1
    return len(node.args) == 1 and not node.kwargs.get("inplace")


def _is(node: Any, model: nn.Module, layers: tuple[type, ...], calls: tuple[Any, ...]) -> bool:
    """Whether a node calls one of some layers or functions."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))) in layers
    return node.op in ("call_function", "call_method") and node.target in calls


def step_of_call(node: fx.Node, model: nn.Module) -> Step:
    """Turn a function or a method that a forward calls into a step."""
    for known in (_add_of, _rows_of, _flatten_of, _pointwise_of, _pool_of, _mean_of):
        if (step := known(node, model)) is not None:
            return step
    name = getattr(node.target, "__name__", node.target)
    raise NotStackableError(f"its forward calls {name} in a way that is not known stacked")


def flatten(start: Any, end: Any) -> Step:
    """Flatten dimensions of a row; those of (clients, rows, ...) lie one further."""
    if not (isinstance(start, int) and isinstance(end, int) and start >= 1 and (end == -1 or end >= start)):
        raise NotStackableError(f"it flattens dimensions {start} to {end}")

    def step(known: Pass, args: Sequence[Any]) -> Value:
        if args[0].side and start >= 2:
            return Value(args[0].tensor.flatten(start, end), side=True)
        return Value(known.apart(args[0]).flatten(start + 1, end if end == -1 else end + 1))

    return step


def pooled(pool: Callable[[Tensor], Tensor], name: str) -> Step:
    """Pool channels side by side; the name ends in the number of places' dimensions: ``AvgPool2d``."""
    dims = 2 + int(name[-2])

    def step(known: Pass, args: Sequence[Any]) -> Value:
        inputs = known.beside(args[0])
        if inputs.ndim != dims:
            # torch takes it for one row, whose windows would then reach over the channels of all clients
            raise ValueError("rows without channels")
        return Value(pool(inputs), side=True)

    return step


def _plain(node: fx.Node) -> bool:
    """Whether a call takes one activation, and settings beside it."""
    others = (*node.args[1:], *node.kwargs.values())
    return bool(node.args) and isinstance(node.args[0], fx.Node) and not any(isinstance(one, fx.Node) for one in others)


def _add_of(node: fx.Node, model: nn.Module) -> Step | None:
    if node.target not in _ADDS or node.kwargs or [isinstance(one, fx.Node) for one in node.args] != [True, True]:
        return None
    if node.target in (operator.iadd, "add_"):
        refuse_shared(node, model)

    def step(known: Pass, args: Sequence[Any]) -> Value:
        side = args[0].side or args[1].side
        one, other = (known.beside(arg) if side else arg.tensor for arg in args)
        if one.ndim != other.ndim:
            # Broadcasting counts dimensions from the end, and the clients' lies at the front.
            raise ValueError("summands differ in their number of dimensions")
        return Value(one + other, side)

    return step


def _rows_of(node: fx.Node, model: nn.Module) -> Step | None:
    """``x.shape``, ``x.shape[0]`` and ``x.size(0)``: read by ``view`` only, which knows them by their nodes."""
    shape = node.target is getattr and node.args[1:] == ("shape",) and all(map(_counts_rows, node.users))
    viewed = _counts_rows(node) and all(_is_view(user) for user in node.users)
    return (lambda known, args: None) if shape or viewed else None


def _flatten_of(node: fx.Node, model: nn.Module) -> Step | None:
    if _is_view(node):
        return flatten(1, -1)
    if node.target not in (torch.flatten, "flatten") or not _plain(node):
        return None
    start, end = (
        node.args[at] if len(node.args) > at else node.kwargs.get(name, default)
        for at, name, default in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    return flatten(start, end)


def _pointwise_of(node: fx.Node, model: nn.Module) -> Step | None:
    if node.target not in _POINTWISE_CALLS or not _plain(node) or node.args[1:] or set(node.kwargs) - {"inplace"}:
        return None
    if node.kwargs.get("inplace"):
        refuse_shared(node, model)
    call: Any = _METHODS.get(str(node.target), node.target)
    return lambda known, args: Value(call(args[0].tensor), args[0].side)


def _pool_of(node: fx.Node, model: nn.Module) -> Step | None:
    if node.target not in _POOL_CALLS or not _plain(node) or node.kwargs.get("return_indices"):
        return None
    pool: Any = node.target
    rest, kwargs = node.args[1:], dict(node.kwargs)
    return pooled(lambda inputs: pool(inputs, *rest, **kwargs), pool.__name__)


def _mean_of(node: fx.Node, model: nn.Module) -> Step | None:
    """A mean over places; channels and rows are no places."""
    if node.target not in (torch.mean, "mean") or not _plain(node) or set(node.kwargs) - {"dim", "keepdim"}:
        return None
    dims = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim") if len(node.args) == 1 else None
    places = (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, list | tuple) else ()
    keep = bool(node.kwargs.get("keepdim", False))
    if not places or not all(isinstance(one, int) for one in places):
        return None

    def step(known: Pass, args: Sequence[Any]) -> Value:
        inputs = known.beside(args[0])
        if any(int(one) % inputs.ndim < 2 for one in places):
            raise ValueError("a mean over rows or channels")
        return Value(inputs.mean(places, keepdim=keep), side=True)

    return step


def _is_view(node: fx.Node) -> bool:
    """Whether a node is ``x.view(rows, -1)``."""
    shaped = node.target in ("view", "reshape") and len(node.args) == 3 and node.args[2] == -1
    return bool(shaped) and _counts_rows(node.args[1])


def _counts_rows(node: Any) -> bool:
    """Whether a node is the number of rows of a batch: ``x.size(0)`` or ``x.shape[0]``."""
    if not isinstance(node, fx.Node) or node.args[1:] != (0,):
        return False
    source = node.args[0]
    of_shape = isinstance(source, fx.Node) and source.target is getattr and source.args[1:] == ("shape",)
    return bool(node.target == "size" or (node.target is operator.getitem and of_shape))
