"""The site of `make docs`, as far as it can be known without a build: navigation and no outside request."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(entry: Any) -> list[str]:
    """All paths of a navigation."""
    if isinstance(entry, dict):
        entry = list(entry.values())
    return [entry] if isinstance(entry, str) else [path for one in entry for path in pages(one)]


def test_the_navigation_leads_to_every_page():
    listed = pages(SITE["nav"])
    folders = tuple(path for path in listed if path.endswith("/"))
    assert [path for path in listed if not (DOCS / path).exists() and path != "readme.md"] == []
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in there if page not in listed and not page.startswith(folders)} == set()


def test_the_site_asks_nobody_for_anything():
    """No font, script or style from elsewhere; the sources are read, not imported."""
    assert SITE["theme"]["font"] is False
    assert SITE["strict"] is True
    files = [ROOT / "mkdocs.yml", *(DOCS / "api").glob("*.css"), *(DOCS / "api").glob("*.js")]
    assert [path.name for path in files if re.search(r"https?://|url\(", path.read_text())] == []
    options = next(plugin["mkdocstrings"] for plugin in SITE["plugins"] if isinstance(plugin, dict))
    assert options["enable_inventory"] is False
    assert options["handlers"]["python"]["options"]["allow_inspection"] is False


def test_names_in_cells_break_at_their_joints_and_flags_do_not():
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(DOCS / "api" / "site_hooks.py"))
    head = "<table><tr><th>a</th><th>b</th><th>c</th></tr>"
    rows = head + "<tr><td><code>tests/test_names.py</code></td><td>{}</td><td>-</td></tr></table>"
    assert "<code>tests/<wbr>test_<wbr>names.<wbr>py</code>" in hooks["table"](rows.format("short"))
    assert "data-columns" not in hooks["table"](rows.format("short"))
    assert '<table data-columns="3">' in hooks["table"](rows.format("a sentence " * 8))
    code = '<code id="a--b">plan --per-group 8 a--b</code>'
    assert hooks["whole_flags"](code) == '<code id="a--b">plan <span class="flag">--per-group</span> 8 a--b</code>'


def test_of_a_pair_of_pictures_the_site_shows_the_one_of_its_colours():
    pytest.importorskip("mkdocs")
    pictures = runpy.run_path(str(DOCS / "api" / "site_hooks.py"))["pictures"]
    text = (
        '<picture>\n<source media="(prefers-color-scheme: dark)" srcset="d.svg">\n<img src="l.svg" alt="A">\n</picture>'
    )
    shown = pictures(text)
    assert '<img src="l.svg#only-light" alt="A"><img src="d.svg#only-dark" alt="A">' in shown
    assert 'class="picture"' in pictures("![A](a.png)")
    assert "![A](a.png)" in pictures("![A](a.png)")
    written = [page for page in DOCS.rglob("*.md") if "<picture>" in page.read_text()]
    assert written
    assert not [page.name for page in written if "<picture>" in pictures(page.read_text())]
