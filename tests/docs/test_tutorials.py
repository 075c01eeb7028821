"""Tutorials say what their code prints: each runs as one script, and its lines are held against those on the page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from oracles.scripts import ran

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

_spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
refresh = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)


def alike(line: str, other: str) -> bool:
    """Equal words; numbers within a tenth and one unit of their last digit: other processors round otherwise."""
    if NUMBER.sub("#", line) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 0.1 * abs(float(a)) + unit(a) for a, b in pairs)


def unit(number: str) -> float:
    """What one more in the last digit is worth."""
    mantissa, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


@pytest.mark.parametrize(
    ("line", "other", "holds"),
    [
        ("loss 0.73", "loss 0.75", True),
        ("loss 0.73", "loss 0.93", False),
        ("gap 0.01", "gap 0.02", True),
        ("verdict will not", "verdict will", False),
        ("1.0e-06", "1.1e-06", True),
        ("1.0e-06", "2.5e-06", False),
        ("a +0.10", "a -0.10", False),
        ("4 of 14", "6 of 14", False),
    ],
)
def test_the_comparison_can_fail(line: str, other: str, holds: bool):
    assert alike(line, other) is holds


def test_every_technique_has_a_tutorial():
    assert {page.stem for page in PAGES} == {"hypergrad", "scaling", "layersample", "sharding", "valley", "federated"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_every_block_shows_what_it_printed(page: Path):
    text = page.read_text()
    assert len(text.splitlines()) <= 160
    assert sum(len(code.splitlines()) for code, _ in refresh.blocks(text)) <= 120
    assert "```python" not in text  # these would run without anyone reading what they print
    assert len(refresh.blocks(text)) == text.count("```py\n") == text.count("```text\n")


@pytest.mark.processes
@pytest.mark.slow  # six scripts
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page: Path, tmp_path: Path):
    """Warnings are errors, the folder is empty."""
    text, program = page.read_text(), tmp_path / "page.py"
    program.write_text(f'import sys\nsys.stdout = open("said", "w")\n{refresh.script(text)}sys.stdout.close()\n')
    assert (failed := ran(program, tmp_path, strict=True)) is None, failed[-2000:]
    printed = refresh.said((tmp_path / "said").read_text())
    shown = [part.strip("\n") for _, part in refresh.blocks(text)]
    pairs = [
        pair for a, b in zip(shown, printed, strict=True) for pair in zip(a.split("\n"), b.split("\n"), strict=True)
    ]
    assert [(a, b) for a, b in pairs if not alike(a, b)] == []
