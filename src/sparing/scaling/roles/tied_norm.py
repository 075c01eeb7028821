"""The norm whose output a tied readout alone takes in, so that its gain can take over a factor on the readout."""

from __future__ import annotations

from torch import nn

from sparing.blocks import submodule
from sparing.scaling.roles.flow import Flow
from sparing.scaling.roles.operations import VIEWS

_ROWS = frozenset({"index", "index_select", "gather"})  # a choice among rows


def tied_norm(model: nn.Module, flow: Flow, table: str) -> str:
    """Return the path of the norm whose output goes into products with a table and nowhere else; or nothing."""
    readers = {use.operation: use.entering for use in flow.of(table) if use.kind == "product"}
    for path, calls in flow.trace.calls.items():
        own = {name: p for name, p in submodule(model, path)._parameters.items() if p is not None}
        once = len(calls) == 1 and len(calls[0][1]) == 1 and all(len(flow.of(f"{path}.{name}")) == 1 for name in own)
        if once and "weight" in own and own["weight"].ndim == 1 and _only_read(flow, calls[0][1][0], readers):
            return path
    return ""


def _only_read(flow: Flow, start: int, readers: dict[int, int]) -> bool:
    """Tell whether every way from an activation leads, times numbers at most, to all of some products."""
    reached, read = {start}, set()
    for at, done in enumerate(flow.trace.operations):
        known = [number for number in done.operands if number in reached]
        if not known:
            continue
        first = done.operands[0] in reached
        if at in readers and known == [readers[at]]:
            read.add(at)
        elif len(known) == 1 and (done.name == "mul" or (first and done.name in VIEWS | _ROWS | {"div"})):
            reached.update(done.results)
        else:
            return False
    return bool(read) and read == readers.keys() and not reached & flow.trace.outputs
