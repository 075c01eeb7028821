"""The budgets of the house: how long a file, a function, a public surface and an import may be."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from house.sources import FUNCTIONS, ROOT, SOURCES, Definition, defined, docstring, exported, module, shown

ALL = SOURCES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FORBIDDEN = {"utils", "common", "core", "helpers", "base", "trainer", "misc"}
TECHNIQUES = ("hypergrad", "scaling", "layersample", "sharding", "valley", "federated")
PACKAGES = (*TECHNIQUES, "blocks", "data", "memory", "report")


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without decorators and docstring."""
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= function.body[0].end_lineno - function.body[0].lineno + 1
    return length


def test_counting_omits_the_docstring():
    tree = ast.parse('def f(x):\n    """One.\n\n    Two.\n    """\n    y = x\n    return y\n')
    assert code_lines(tree.body[0]) == 3


@pytest.mark.parametrize(("paths", "lines"), [(ALL, 400), (EXAMPLES, 80)], ids=["all", "examples"])
def test_files_are_short(paths: list[Path], lines: int):
    assert [str(path.relative_to(ROOT)) for path in paths if path.read_bytes().count(b"\n") > lines] == []


def functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function below these statements; expressions, most of a tree, are not walked."""
    for node in body:
        if isinstance(node, FUNCTIONS):
            yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from functions(getattr(node, name, []))


def test_functions_are_at_most_40_lines_and_half_of_them_at_most_10():
    gc.disable()  # a collection for every few files would take as long as reading them
    try:
        found = [
            (path.relative_to(ROOT), node.name, code_lines(node))
            for path in SOURCES
            for node in functions(ast.parse(path.read_text()).body)
        ]
    finally:
        gc.enable()
    assert len(found) > 3000
    assert [one for one in found if one[2] > 40] == []
    assert statistics.median(lines for _, _, lines in found) <= 10


def test_no_drawer_modules():
    assert [path for path in SOURCES if path.stem in FORBIDDEN or path.parent.name in FORBIDDEN] == []


def test_every_package_that_users_import_from_is_in_the_list():
    packages = {path.parent.name for path in (ROOT / "src" / "sparing").glob("*/__init__.py")}
    assert packages == {*PACKAGES, "jobs"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_its_page_shows(package: str):
    """So ``from sparing.hypergrad import *`` gives everything that is promised, and nothing else; each name once."""
    names = [dotted.rpartition(".")[2] for dotted in shown() if dotted.split(".")[1] == package]
    assert sorted(names) == sorted(exported(f"sparing.{package}"))


def test_the_pages_name_each_thing_where_a_reader_of_sources_finds_it():
    """It takes the module where a module has the function's name, so such a function is named by its full path."""
    assert [dotted for dotted in shown() if defined(dotted) is None or module(dotted) is not None] == [
        "sparing.report.plots"
    ]


def test_public_names_stay_few():
    """At most 157 over the techniques and the top level, methods and laws counted one by one."""
    assert sum(len(exported(package)) for package in ("sparing", *(f"sparing.{name}" for name in TECHNIQUES))) <= 157


def test_public_names_are_documented():
    things = {dotted: defined(dotted) for dotted in shown()}
    assert [name for name, node in things.items() if isinstance(node, Definition) and not docstring(node).strip()] == []


HEAVY = ("transformers", "peft", "datasets", "matplotlib", "jinja2", "tyro", "accelerate", "gguf")


def in_a_fork(check: Callable[[], None]) -> int:
    """Exit status of a child that has torch, as this process has, and none of our modules yet."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            for name in [name for name in sys.modules if name.split(".")[0] in {"sparing", *HEAVY}]:
                del sys.modules[name]
            check()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_import_is_light():
    """Nothing heavy is loaded, and ``import sparing`` takes at most 100 ms of processor time beyond torch."""

    def check() -> None:
        start = time.process_time()
        importlib.import_module("sparing")
        cost = time.process_time() - start
        for name in ("layersample", "memory"):
            importlib.import_module(f"sparing.{name}")
        assert cost <= 0.1, cost
        assert [name for name in HEAVY if name in sys.modules] == []

    assert in_a_fork(check) == 0


def test_nothing_unsafe_is_loaded():
    """Files of users never pass through pickle, ``eval`` or ``exec``."""
    pickled = r"\bpickle\.\w*[lL]oad|\bUnpickler|torch\.load\((?!.*weights_only=True)"
    unsafe = re.compile(rf"(?<![\w.])(eval|exec)\(|{pickled}")
    messages = {"src/sparing/valley/scans/workers.py"}  # what one process of ours packs for another
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in messages
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unsafe.search(line)
    ]
    assert found == []
