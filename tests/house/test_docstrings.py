"""Docstrings by audience: names that users import say everything in sections; all others may say it in a line."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^::: (sparing[\w.]*)$", re.MULTILINE)


def shown() -> Iterator[tuple[str, Any]]:
    """What ``docs/api`` shows: functions, and classes with their public methods."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for dotted in SHOWN.findall(page.read_text()):
            thing = found(dotted)
            if inspect.isfunction(thing):
                yield dotted, thing
            elif inspect.isclass(thing):
                methods = ((name, getattr(value, "__func__", value)) for name, value in vars(thing).items())
                yield from (
                    (f"{dotted}.{name}", method)
                    for name, method in methods
                    if not name.startswith("_") and inspect.isfunction(method)
                )


def found(dotted: str) -> Any:
    """The object of a dotted name; a function may stand in the place of the module of its name."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return getattr(found(module), name)


def missing(function: Any) -> list[str]:
    """What the docstring of a public function leaves unsaid; a method may have a line, for its class says the rest."""
    told = inspect.getdoc(function) or ""
    if "." in function.__qualname__.rpartition("<locals>.")[2] and "\n" not in told:
        return []
    signature = inspect.signature(function)
    passed = [name for name in signature.parameters if name not in {"self", "cls"} and not name.startswith("_")]
    gaps = [name for name in passed if not re.search(rf"^ +\*{{0,2}}{name}:", told, re.MULTILINE)]
    if signature.return_annotation not in {None, "None"} and not re.search("^(Returns|Yields):", told, re.MULTILINE):
        gaps.append("Returns")
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))
    if any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree)) and "Raises:" not in told:
        gaps.append("Raises")
    return gaps


def test_public_names_have_sections():
    assert {name: gaps for name, function in shown() if (gaps := missing(function))} == {}


def test_a_gap_is_found():
    def half(x: int, y: int) -> int:
        """Add.

        Args:
            x: One.
        """
        if x < 0:
            raise ValueError(x)
        return x + y

    assert missing(half) == ["y", "Returns", "Raises"]
