"""From an equation to its function and its test: every name on the page exists, and every cited equation is there."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "equations.md").read_text()
TITLES = {
    "hypergrad": "Hypergradients", "scaling": "Scaling", "layersample": "Layer sampling", "sharding": "Sharding",
    "valley": "Valleys", "federated": "Federated learning",
}  # fmt: skip
FUNCTION = re.compile(r"\[`([\w.]+)`\]\(\.\./src/sparing/([\w/]+)\.py\)")
TEST = re.compile(r"\[`([\w/]+\.py)::(\w+)`\]\(\.\./tests/([\w/]+\.py)\)")
NUMBERED = re.compile(r"\b([Ee]q\.|[Ee]quations?|[Aa]lgorithm|Lemma|Listing|Definition|Recipe|Table) ")
"""What in a Source line says that a numbered thing of a paper is computed."""


def section(title: str) -> list[str]:
    """Rows of the tables under a heading, without their heads."""
    text = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| test |")]


ROWS = [
    pytest.param(row, id=f"{room}: {row.split('|')[1].strip()}") for room in TITLES for row in section(TITLES[room])
]


@cache
def defined(path: Path) -> set[str]:
    """Functions and classes that a file defines at its top level."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def named() -> set[str]:
    return {name for name, _ in FUNCTION.findall(PAGE)}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_source_formula_function_and_test(row: str):
    cells = row.strip("|").split("|")
    assert len(cells) == 4, "a bar in a formula ends its cell: write abs(x)"
    assert all(cell.strip() for cell in cells)
    assert FUNCTION.search(cells[2])
    assert TEST.search(cells[3])


def test_every_technique_has_rows_of_its_own_functions():
    for room, title in TITLES.items():
        found = [name for row in section(title) for name, _ in FUNCTION.findall(row)]
        assert sum(name.startswith(f"{room}.") for name in found) >= 5


def test_functions_are_importable_and_lie_where_their_links_lead():
    for name, path in FUNCTION.findall(PAGE):
        module, _, attribute = name.rpartition(".")
        assert module.replace(".", "/") == path, name
        assert attribute in defined(ROOT / "src" / "sparing" / f"{path}.py"), name
        if not name.startswith("jobs."):  # whose modules are heavy to import; the line above found the name
            assert hasattr(importlib.import_module(f"sparing.{module}"), attribute), name


def test_tests_exist_where_their_links_lead():
    for path, name, link in TEST.findall(PAGE):
        assert path == link
        assert name in defined(ROOT / "tests" / path), f"{path}::{name}"


def sources(room: str) -> list[tuple[str, str]]:
    """Dotted name and Source paragraph of every public docstring of a room that cites something numbered."""
    found = []
    for path in sorted((ROOT / "src" / "sparing" / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        kinds = (ast.FunctionDef, ast.ClassDef)
        public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        for node in [tree, *public]:
            paragraph = re.search(r"^Source: .*?(?=\n\n|\Z)", ast.get_docstring(node) or "", re.MULTILINE | re.DOTALL)
            if paragraph and NUMBERED.search(paragraph[0]):
                name = f".{node.name}" if isinstance(node, kinds) else ""
                module = ".".join(path.relative_to(ROOT / "src" / "sparing").with_suffix("").parts)
                found.append((f"{module.removesuffix('.__init__')}{name}", paragraph[0]))
    return found


CITED = [pytest.param(*one, id=one[0]) for room in TITLES for one in sources(room)]


@pytest.mark.parametrize(("name", "source"), CITED)
def test_what_a_docstring_cites_by_number_is_on_the_page(name: str, source: str):
    """A module counts as named if one of its functions is."""
    assert any(one == name or one.startswith(f"{name}.") for one in named()), source


def test_docstrings_cite_enough_for_that_to_mean_something():
    assert len(CITED) >= 40
