"""The sources as syntax trees, each file parsed once: what a rule can see in a tree needs no import."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def shown() -> list[str]:
    """Dotted names that ``docs/api`` shows."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (sparing[\w.]*)$", page.read_text(), re.MULTILINE)]


def module(dotted: str) -> Path | None:
    """File of a module or package."""
    place = (ROOT / "src").joinpath(*dotted.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def exported(package: str) -> list[str]:
    """``__all__`` of a package."""
    for node in parsed(module(package)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package} has no __all__")


def defined(dotted: str) -> ast.AST | None:
    """Where the last name of a dotted one is defined or assigned, through imports; also those for type checkers."""
    home, _, name = dotted.rpartition(".")
    if (path := module(home)) is None:
        return None
    body = parsed(path).body
    for node in [*body, *(one for branch in body if isinstance(branch, ast.If) for one in branch.body)]:
        if isinstance(node, Definition) and node.name == name:
            # a signature for type checkers comes before what it belongs to
            if any(ast.unparse(one) == "overload" for one in node.decorator_list):
                continue
            return node
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparing":
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    whole = f"{node.module}.{alias.name}"
                    return node if whole == dotted else defined(whole)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
    return None


def docstring(node: Definition) -> str:
    return ast.get_docstring(node) or ""
