"""The budgets of the house: how long a file, a function, a public surface and an import may be."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
ALL = SOURCES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FORBIDDEN = {"utils", "common", "core", "helpers", "base", "trainer", "misc"}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without decorators and docstring."""
    end = function.end_lineno or function.lineno
    length = end - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def functions(path: Path) -> list[tuple[str, int]]:
    """Every function of a file with its number of code lines."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, code_lines(node)) for node in ast.walk(tree) if isinstance(node, kinds)]


def test_counting_leaves_out_the_docstring():
    tree = ast.parse('def f(x):\n    """One.\n\n    Two.\n    """\n    y = x\n    return y\n')
    assert code_lines(tree.body[0]) == 3


def longer(paths: list[Path], lines: int) -> list[str]:
    """Files of more lines than these."""
    return [str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > lines]


def test_files_are_at_most_400_lines():
    assert longer(ALL, 400) == []


def test_examples_are_at_most_80_lines():
    assert longer(EXAMPLES, 80) == []


def test_functions_are_at_most_40_lines_and_short_as_a_whole():
    """Median at most 10 lines, 95th percentile at most 40."""
    found = [(path.relative_to(ROOT), name, lines) for path in SOURCES for name, lines in functions(path)]
    assert [one for one in found if one[2] > 40] == []
    lengths = sorted(lines for _, _, lines in found)
    assert statistics.median(lengths) <= 10
    assert lengths[int(0.95 * (len(lengths) - 1))] <= 40


def test_no_drawer_modules():
    assert [path for path in SOURCES if path.stem in FORBIDDEN or path.parent.name in FORBIDDEN] == []


def public_names() -> dict[str, list[str]]:
    """``__all__`` of the package and of each room a user imports from."""
    import sparing

    rooms = {"sparing": list(sparing.__all__)}
    for info in pkgutil.iter_modules(sparing.__path__):
        if info.ispkg and info.name != "jobs":
            rooms[info.name] = list(importlib.import_module(f"sparing.{info.name}").__all__)
    return rooms


def shown_names() -> dict[str, set[str]]:
    """What ``docs/api`` shows of each room."""
    found: dict[str, set[str]] = {}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for dotted in re.findall(r"^::: sparing\.([\w.]+)$", page.read_text(), re.MULTILINE):
            found.setdefault(dotted.partition(".")[0], set()).add(dotted.rpartition(".")[2])
    return found


def test_what_a_room_exports_is_what_its_page_shows():
    """So ``from sparing.hypergrad import *`` gives everything that is promised, and nothing else."""
    shown, rooms = shown_names(), public_names()
    assert {room: set(names) ^ shown[room] for room, names in rooms.items() if room != "sparing"} == {
        room: set() for room in rooms if room != "sparing"
    }


def test_public_names_stay_few():
    """At most 140 over the techniques and the top level, methods and laws counted one by one."""
    rooms = public_names()
    techniques = {"sparing", "hypergrad", "scaling", "layersample", "sharding", "valley", "federated"}
    assert sum(len(names) for room, names in rooms.items() if room in techniques) <= 140


def test_public_names_exist_and_are_documented():
    for room, names in public_names().items():
        module = importlib.import_module("sparing" if room == "sparing" else f"sparing.{room}")
        for name in names:
            thing = getattr(module, name)
            if isinstance(thing, type) or hasattr(thing, "__code__"):
                assert (thing.__doc__ or "").strip(), f"{room}.{name} has no docstring"


HEAVY = ("transformers", "peft", "datasets", "matplotlib", "jinja2", "tyro", "accelerate", "gguf")


@pytest.mark.processes
@pytest.mark.parametrize("module", ["sparing", "sparing.layersample", "sparing.memory"])
def test_import_pulls_in_nothing_heavy(module: str):
    code = f"import sys, {module}; print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def import_cost() -> float:
    """Milliseconds that ``import sparing`` spends outside torch (interpreter's own import clock)."""
    command = [sys.executable, "-X", "importtime", "-c", "import torch, sparing"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pattern = re.compile(r"import time:\s+\d+ \|\s+(\d+) \| (sparing)$", re.MULTILINE)
    return int(pattern.findall(report)[-1][0]) / 1000


@pytest.mark.processes
def test_import_costs_at_most_100_ms_beyond_torch():
    """The least of three: a busy machine only ever adds time."""
    assert min(import_cost() for _ in range(3)) <= 100


def test_nothing_unsafe_is_loaded():
    """Files of users never pass through pickle, ``eval`` or ``exec``."""
    pickled = r"\bpickle\.\w*[lL]oad|\bUnpickler|torch\.load\((?!.*weights_only=True)"
    unsafe = re.compile(rf"(?<![\w.])(eval|exec)\(|{pickled}")
    messages = {"src/sparing/valley/workers.py"}  # what one process of ours packs for another
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unsafe.search(line) and str(path.relative_to(ROOT)) not in messages
    ]
    assert found == []
