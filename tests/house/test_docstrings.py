"""Docstrings by audience: names that users import say everything in sections; all others may say it in a line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house.sources import FUNCTIONS, defined, docstring, shown

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public() -> Iterator[tuple[str, Function, bool]]:
    """What ``docs/api`` shows: functions, and of classes the public methods; whether it is a method."""
    for dotted in shown():
        node = defined(dotted)
        if isinstance(node, FUNCTIONS):
            yield dotted, node, False
        elif isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, FUNCTIONS) and not one.name.startswith("_") and not attribute(one):
                    yield f"{dotted}.{one.name}", one, True


def attribute(function: Function) -> bool:
    """Whether it is read like a value, as a property is, and takes nothing."""
    names = {ast.unparse(one).rpartition(".")[2] for one in function.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def missing(function: Function, *, method: bool = False) -> list[str]:
    """What the docstring of a public function leaves unsaid; a method may have a line, for its class says the rest."""
    text = docstring(function)
    if method and "\n" not in text:
        return []
    taken = function.args
    names = [*taken.posonlyargs, *taken.args, *filter(None, [taken.vararg]), *taken.kwonlyargs]
    names += filter(None, [taken.kwarg])
    passed = [one.arg for one in names if one.arg not in {"self", "cls"} and not one.arg.startswith("_")]
    gaps = [name for name in passed if not re.search(rf"^ +\*{{0,2}}{name}:", text, re.MULTILINE)]
    result = ast.unparse(function.returns) if function.returns else "nothing is said"
    if result != "None" and not re.search("^(Returns|Yields):", text, re.MULTILINE):
        gaps.append("Returns")
    if any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(function)) and "Raises:" not in text:
        gaps.append("Raises")
    return gaps


def test_public_names_have_sections():
    found = list(public())
    assert len(found) > 100
    assert {name: gaps for name, function, method in found if (gaps := missing(function, method=method))} == {}


def test_a_gap_is_found():
    half = '''
def half(x: int, y: int) -> int:
    """Add.

    Args:
        x: One.
    """
    if x < 0:
        raise ValueError(x)
    return x + y
'''
    assert missing(ast.parse(half).body[0]) == ["y", "Returns", "Raises"]
