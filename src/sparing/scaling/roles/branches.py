"""Residual branches, from a forward pass: which matrices end them, and whether one factor on each reaches them all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from sparing.blocks import submodule
from sparing.scaling.model.multipliers import HIDDEN
from sparing.scaling.roles.flow import Flow, Use
from sparing.scaling.roles.operations import KEEPING, slots

_LINEAR = KEEPING | {"add", "sub", "rsub", "mul", "div", "sum"}


def branch_ends(flow: Flow, body: Collection[str]) -> dict[int, Use]:
    """Return the last products of the branches, by index: what the readout's input, the stream, is a sum of."""
    readouts = {at for at, use in enumerate(flow.uses) if use.kind == "product" and not use.followed}
    # Of a bare backbone the stream is what comes out. Caches of keys and values come out too: a product follows those.
    sums = [number for number in flow.trace.outputs if readouts & _keys(flow, number)]
    sums += [use.entering for at in readouts if (use := flow.uses[at]).parameter not in body]
    found: dict[int, Use] = {}
    done: set[int] = set()
    while sums:
        for at in _keys(flow, sums.pop()) - done:
            done.add(at)
            use = flow.uses[at]
            if use.kind == "product" and use.parameter not in body:
                sums.append(use.entering)  # a projection of the stream between or behind blocks
            elif use.kind == "product" and not use.chooses:
                found[at] = use
    return found


def branch_fault(model: nn.Module, flow: Flow, blocks: Mapping[str, Collection[str]]) -> str:
    """Return why the branches of blocks (path -> parameters) cannot each be multiplied once; empty if they can."""
    ends = branch_ends(flow, {name for params in blocks.values() for name in params})
    made = {number: at for at, done in enumerate(flow.trace.operations) for number in done.results}
    paths = {hooked(model, use.parameter) for use in ends.values()}
    hooks = [out[0] for path in paths for _, out in flow.trace.calls.get(path, []) if out]
    for block, params in blocks.items():
        if not any(use.parameter in params for use in ends.values()):
            return f"{block}, which adds nothing to a stream"
    if pair := _multiplied(flow, ends):
        return f"a branch that multiplies {pair[0]} by {pair[1]}"
    for at, use in ends.items():
        added = added_at(flow, use, at)
        if added is None:
            return f"{use.parameter}, which is added to no stream"
        if bent := _bent(flow, use, added):
            return f"a branch in which {bent} follows {use.parameter}"
        count = sum(use.operation <= made.get(one, -1) < added and at in _keys(flow, one) for one in hooks)
        if count != 1:
            return f"{use.parameter}, of which the output is that of {count or 'no'} modules"
    return ""


def hooked(model: nn.Module, name: str) -> str:
    """Return the path of the module whose output is multiplied for a parameter: its own, or its caller's."""
    path = name.rpartition(".")[0]
    return path.rpartition(".")[0] if type(submodule(model, path)).__name__ in HIDDEN else path


def _keys(flow: Flow, number: int) -> set[int]:
    scale = flow.scales.get(number)
    return {key for key in scale.degrees if isinstance(key, int)} if scale else set()


def _multiplied(flow: Flow, ends: Mapping[int, Use]) -> tuple[str, str] | None:
    """Return two ends of which the outputs are multiplied by each other, so that a factor on both would be squared."""
    for done in flow.trace.operations:
        if done.name in {"mul", "div"} and len(data := _data(flow, done.operands)) == 2:
            first, second = (_keys(flow, number) & ends.keys() for number in data)
            if first - second and second - first:
                return ends[min(first - second)].parameter, ends[min(second - first)].parameter
    return None


def _bent(flow: Flow, use: Use, stop: int) -> str:
    """Return the first operation before another that does not go with the size of what a product gave; or nothing."""
    reached = {use.leaving}
    for done in flow.trace.operations[use.operation + 1 : stop]:
        known = [number for number in done.operands if number in reached]
        if known and (done.name not in _LINEAR or (done.name in {"mul", "div"} and len(known) > 1)):
            return done.name
        reached.update(done.results if known else ())
    return ""


def added_at(flow: Flow, use: Use, at: int) -> int | None:
    """Return the operation that adds what a product gave to what the product came from, the stream."""
    stream = {flow.root(number) for number in _behind(flow, use)}
    for index, done in enumerate(flow.trace.operations):
        data = _data(flow, done.operands)
        if done.name != "add" or len(data) != 2:
            continue
        joined = [flow.root(number) in stream for number in data]
        if any(other and at in _keys(flow, number) for number, other in zip(data, joined[::-1], strict=True)):
            return index
        # The stream with a parallel branch on it: what it is added to next need not be behind that product.
        stream.update(flow.root(number) for number in done.results if any(joined))
    return None


def _data(flow: Flow, operands: Sequence[int]) -> list[int]:
    return [number for number in operands if number in flow.scales]


def _behind(flow: Flow, use: Use) -> set[int]:
    """Return the activations that a product comes from."""
    reached = {number for number in slots(flow.trace.operations[use.operation]) if number in flow.scales}
    for index in range(use.operation - 1, -1, -1):
        done = flow.trace.operations[index]
        if any(number in reached for number in done.results):
            reached |= set(_data(flow, done.operands))
    return reached
