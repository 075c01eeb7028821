"""Which reorderings of a net's units leave its function unchanged, found from a forward pass recorded on examples."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparing.blocks.modes import evaluating
from sparing.errors import UserError, require
from sparing.valley.aligning.axes import Leaf, indices, is_pinned, leaves, pin, pinned
from sparing.valley.aligning.operators import ANSWERING, MIXING, RULES, Axes, TensorAxes, tensors_in
from sparing.valley.merging.compatible import is_statistic, storage_key

_TRACE = "record what the model does on plain tensors, or align a part of it that can be recorded"


@dataclass(frozen=True, slots=True, eq=False)
class Symmetry:
    """The groups of units of a net that may be reordered, and where in its tensors they lie."""

    tensors: Mapping[str, Axes]  # of every parameter and statistic by name, tied ones under each of their names
    groups: tuple[Leaf, ...]  # what may be reordered, in the order in which the net computes
    graph: fx.GraphModule  # the recorded forward pass, whose parameters and buffers are inputs
    inputs: Mapping[str, str]  # name of an input of the graph -> name of the parameter or buffer that it takes
    answers: Mapping[str, Axes]  # of the operators whose results are what the units answer, the axes of those
    constants: Mapping[str, Tensor]  # name of an input of the graph -> what no state holds: other buffers, literals

    def reordered(self, state: Mapping[str, Tensor], orders: Mapping[Leaf, Tensor]) -> dict[str, Tensor]:
        """A state with its units in another order; what no group reaches is the same tensor as before."""
        found = dict(state)
        done: dict[object, Tensor] = {}  # tied tensors stay one
        for name, axes in self.tensors.items():
            if name not in state or not any(leaf in orders for axis in axes for leaf in leaves(axis)):
                continue
            key = storage_key(name, state[name])
            if key not in done:
                done[key] = state[name]
                for dim, axis in enumerate(axes):
                    done[key] = done[key].index_select(dim, indices(axis, orders).to(done[key].device))
            found[name] = done[key]
        return found

    def name_of(self, group: Leaf) -> str:
        """The first parameter whose outputs, or else any of whose dimensions, are a group's units."""
        found = [
            (dim, name)
            for name, axes in self.tensors.items()
            for dim, axis in enumerate(axes)
            if group in leaves(axis) and not is_statistic(name)
        ]
        return min(found, key=lambda one: one[0])[1]


def symmetry_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Symmetry:
    """Record one forward pass and find what may be reordered; inputs and outputs stay in their order."""
    program = _exported(model, args, dict(kwargs or {}))
    signature = program.graph_signature
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    used = {inputs[node.name] for node in placeholders if node.name in inputs and node.users}
    tensors = _tensor_axes(model, used)
    known: dict[fx.Node, Any] = {}
    answers: dict[str, dict[str, Axes]] = {"answering": {}, "mixing": {}}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            known[node] = tensors.get(inputs.get(node.name, "")) or _pinned_like(value)
        elif node.op == "output":
            for axes in tensors_in(_filled(node.args, known)):
                pin(*axes)
        elif node.op == "call_function":
            known[node] = _result(node, known)
            kind = "answering" if _name(node) in ANSWERING else "mixing" if _name(node) in MIXING else ""
            if kind and isinstance(node.meta.get("val"), Tensor):
                answers[kind][node.name] = known[node]
    found = [leaf for axes in tensors.values() for axis in axes for leaf in leaves(axis)]
    groups = tuple(dict.fromkeys(found))
    why = "none of its units can be reordered without changing what it computes"
    require(bool(groups), "model", type(model).__name__, why, "pass a net with hidden units")
    taken = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    constants = {name: program.constants[of] for name, of in taken.items() if of in program.constants}
    return Symmetry(tensors, groups, program.graph_module, inputs, _telling(**answers), constants)


def _telling(answering: Mapping[str, Axes], mixing: Mapping[str, Axes]) -> dict[str, Axes]:
    """What the units answer; where no function gives a group's answers, what mixes its units."""
    told = {leaf for axes in answering.values() for axis in axes for leaf in leaves(axis)}
    rest = {
        name: axes for name, axes in mixing.items() if any(leaf not in told for axis in axes for leaf in leaves(axis))
    }
    return {**answering, **rest}


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return torch.export.export(model, args, kwargs, strict=False)
    except UserError:
        raise
    except Exception as error:  # torch.export documents no exceptions, and lets through those of the model
        words = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        why = f"its forward pass cannot be recorded ({words})"
        raise UserError("model", got=type(model).__name__, why=why, do=_TRACE) from error


def _tensor_axes(model: nn.Module, used: set[str]) -> dict[str, Axes]:
    """Axes of all parameters and buffers: free for what is used and may be reordered, shared by tied names."""
    found: dict[str, Axes] = {}
    shared: dict[int, Axes] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    reached = {id(tensor) for name, tensor in named if name in used}
    for name, tensor in named:
        free = id(tensor) in reached and (isinstance(tensor, nn.Parameter) or is_statistic(name))
        axes: Axes = [Leaf(size, pinned=not free) for size in tensor.shape]
        found[name] = shared.setdefault(id(tensor), axes)
    return found


def _pinned_like(value: Any) -> Any:
    """Pinned axes for a result of an operator, or of each part of it."""
    if isinstance(value, Tensor):
        return [pinned(size) for size in value.shape]
    if isinstance(value, list | tuple):
        return tuple(_pinned_like(one) for one in value)
    return None


def _filled(value: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the axes of tensors in the place of nodes."""
    if isinstance(value, fx.Node):
        axes = known.get(value)
        return TensorAxes(axes) if isinstance(axes, list) else [TensorAxes(one) for one in axes or () if one]
    if isinstance(value, Mapping):
        return {key: _filled(one, known) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(one, known) for one in value]
    return value


def _name(node: fx.Node) -> str:
    """Name of an ATen operator without its overload; one that works in place is named as its plain form."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__name__", node.target))
    name = str(node.target._schema.name).rpartition("::")[2]
    return name if name.endswith("__") else name.removesuffix("_")


def _result(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Axes of what an operator returns; unites or pins those of what it takes."""
    if node.target is operator.getitem:
        source, at = node.args
        assert isinstance(source, fx.Node)
        return known[source][at]
    value = node.meta.get("val")
    arguments = [_filled(one, known) for one in node.args]
    options = {name: _filled(one, known) for name, one in node.kwargs.items()}
    taken = tensors_in([arguments, options])
    if all(is_pinned(axis) for axes in taken for axis in axes):
        return _pinned_like(value)
    name = _name(node)
    if name not in RULES or not isinstance(node.target, torch._ops.OpOverload):
        raise UserError(
            "model", got=f"the operator {name}{_place(node)}", why="what it asks of the order of units is not known",
            do="align a net of linear, convolution, norm, attention and elementwise layers",
        )  # fmt: skip
    names = [one.name for one in node.target._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | options
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    found = RULES[name](given, shape)
    if isinstance(value, Tensor):
        assert tuple(axis.size for axis in found) == shape, f"{name}: {found} for {shape}"  # type: ignore[union-attr]
    return found


def _place(node: fx.Node) -> str:
    """The module that an operator belongs to, in words."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return f" in {path!r}" if path else ""
