"""How the code is written, in numbers: lines, docstrings, comments, one-call helpers. ``python -m benchmarks.house``.

A helper counts if its name begins with one underscore, it has at most four lines and its name occurs once beside its
definition in its own file; a comment, if it has a line of its own.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def figures(folder: Path) -> dict[str, float]:
    """Counts over all Python files of a folder."""
    found = {"files": 0, "lines": 0, "docstring lines": 0, "code lines": 0, "own-line comments": 0, "functions": 0}
    helpers = 0
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        tree, lines = ast.parse(text), text.splitlines()
        told: set[int] = set()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        comments = sum(line.strip().startswith("#") for number, line in enumerate(lines, 1) if number not in told)
        blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in told)
        defined = [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
        found["files"] += 1
        found["lines"] += len(lines)
        found["docstring lines"] += len(told)
        found["own-line comments"] += comments
        found["code lines"] += len(lines) - len(told) - blank - comments
        found["functions"] += len(defined)
        helpers += sum(_one_call(node, text) for node in defined)
    return {
        **found,
        "code lines per file": found["code lines"] / found["files"],
        "comments per code line": found["own-line comments"] / found["code lines"],
        "one-call helpers (%)": 100 * helpers / found["functions"],
    }


def _one_call(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> bool:
    private = node.name.startswith("_") and not node.name.startswith("__")
    body = [line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    length = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
    return private and 0 < length <= 4 and len(re.findall(rf"\b{node.name}\b", text)) == 2


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "sparing"
    sys.stdout.write(json.dumps({name: round(value, 4) for name, value in figures(where).items()}, indent=1) + "\n")
