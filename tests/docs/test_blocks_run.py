"""Every code block of README and docs runs: Python blocks as scripts; console lines parse, and options exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

from oracles.scripts import ran
from sparing.cli import VERBS, main

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
    pytest.param(shlex.split(line, comments=True)[1:], id=f"{page.relative_to(ROOT)}: {line[:40]}")
    for page in PAGES
    for code in fenced(page, "console")
    for line in code.replace("\\\n", " ").splitlines()
    if line.startswith("sparing ")
]
NAMED = [
    pytest.param(verb, re.findall(r"--([a-z][\w.-]*)", rest), id=f"{page.relative_to(ROOT)}: {verb}{rest[:40]}")
    for page in PAGES
    for verb, rest in re.findall(r"`[^`\n]*\bsparing (\w+)( [^`\n]*--[a-z][^`\n]*)`", page.read_text())
]


@pytest.mark.processes
@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_blocks_run_in_order(page: Path, code: str, tmp_path: Path):
    """The blocks of one page are one script, run in an empty folder with warnings as errors."""
    script = tmp_path / "page.py"
    script.write_text(code)
    assert (failed := ran(script, tmp_path, strict=True)) is None, failed[-2000:]


def settings(verb: str) -> type:
    return importlib.import_module(VERBS[verb].module).Settings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", CONSOLE)
def test_console_lines_parse(words: list[str], capsys: pytest.CaptureFixture[str]):
    """By the settings that the command itself has; nothing is run."""
    verb, *rest = words
    if verb.startswith("--"):
        assert main(words) == 0
    else:
        assert isinstance(tyro.cli(settings(verb), args=[word for word in rest if word != "--json"]), settings(verb))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("verb", "flags"), NAMED)
def test_options_named_in_a_sentence_exist(verb: str, flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        tyro.cli(settings(verb), args=["--help"])
    known = set(re.findall(r"--([a-z][\w.-]*)", capsys.readouterr().out)) | {"help", "json", "debug", "config"}
    assert set(flags) <= known


def anchors(page: Path) -> set[str]:
    """What a link may name inside a page, as GitHub derives it from the headings."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_relative_links_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]+))?\)")
    targets = [
        (page, (page.parent / target) if target else page, anchor)
        for page in PAGES
        for target, anchor in link.findall(page.read_text())
    ]
    broken = [
        f"{page.relative_to(ROOT)} -> {target}#{anchor}"
        for page, target, anchor in targets
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]
    assert broken == []
