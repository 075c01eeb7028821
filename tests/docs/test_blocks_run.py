"""Every code block of README and docs runs: Python blocks as scripts, console blocks' verbs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oracles.scripts import ran

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fenced(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


PYTHON = [
    pytest.param(page, "\n".join(fenced(page, "python")), id=str(page.relative_to(ROOT)))
    for page in PAGES
    if fenced(page, "python")
]
CONSOLE = [
    pytest.param(line.split()[1], id=f"{page.relative_to(ROOT)}:{line[:40]}")
    for page in PAGES
    for code in fenced(page, "console")
    for line in code.replace("\\\n", " ").splitlines()
    if line.startswith("sparing ")
]


@pytest.mark.processes
@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_blocks_run_in_order(page: Path, code: str, tmp_path: Path):
    """The blocks of one page are one script, run in an empty folder with warnings as errors."""
    script = tmp_path / "page.py"
    script.write_text(code)
    assert (failed := ran(script, tmp_path, strict=True)) is None, failed[-2000:]


@pytest.mark.parametrize("verb", CONSOLE)
def test_console_lines_name_a_verb(verb: str):
    from sparing.cli import VERBS

    assert verb in VERBS or verb.startswith("--")


def test_relative_links_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")
    targets = [(page, target) for page in PAGES for target in link.findall(page.read_text())]
    broken = [
        f"{page.relative_to(ROOT)} -> {target}" for page, target in targets if not (page.parent / target).exists()
    ]
    assert broken == []
