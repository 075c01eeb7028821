"""What an expression in a module's source stands for: attributes, globals, shapes and tests, looked up live."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Arguments = Mapping[int | str, float | None]  # ratios of arguments, by position or name; None for a tensor
PathFactors = tuple[float, ...]  # factors other than 1 on one path through the branches


@dataclass
class Scope:
    """One function that is being read."""

    self_name: str  # name of its first argument, if it is a method
    owner: Any  # what that is, in the model
    base: Any  # the same in the base
    globals: dict[str, Any]
    depth: int  # calls that lead here
    names: dict[str, float | None] = field(default_factory=dict)  # local name -> ratio; None for a tensor
    paths: set[PathFactors] = field(default_factory=lambda: {()})  # factors so far, by path through the branches
    returned: set[PathFactors] = field(default_factory=set)  # the same of paths that have returned
    result: float | None = None


def names_in(node: ast.expr) -> list[str]:
    """Return the parts of ``a.b.c``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def get(held: Any, path: Sequence[str]) -> Any:
    """Follow attributes; None where one is missing."""
    for name in path:
        held = getattr(held, name, None)
    return held


def global_(name: str, names: dict[str, Any]) -> Any:
    """Look up a name that is not local; None where there is none."""
    builtins: Any = names.get("__builtins__", {})
    return names.get(name, builtins.get(name) if isinstance(builtins, dict) else getattr(builtins, name, None))


def ratio_of(value: Any, base: Any) -> float | None:
    """Return value over base of numbers or one-entry tensors; None for others, NaN where the base is 0 or meta."""
    if isinstance(value, Tensor) and isinstance(base, Tensor) and value.numel() == base.numel() == 1:
        value, base = (float(one) if not one.is_meta else math.nan for one in (value, base))
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(base, int | float):
        return None
    return 1.0 if value == base else value / base if value * base > 0 else math.nan


def truth(test: ast.expr, scope: Scope) -> bool | None:
    """Return the truth of a test of an attribute of the module; None for any other test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand, scope)
        return None if inner is None else not inner
    path = names_in(test)
    # ``training`` changes during a run, so both of its branches must agree.
    if len(path) < 2 or path[0] != scope.self_name or path[-1] == "training":
        return None
    value = get(scope.owner, path[1:])
    return bool(value) if isinstance(value, bool | int | float | str) else None


def shape_of(node: ast.expr) -> ast.expr | None:
    """Return the tensor of ``x.shape`` or ``x.size()``, else None."""
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return node.value
    call = isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute)
    return node.func.value if call and node.func.attr == "size" else None  # type: ignore[attr-defined]
