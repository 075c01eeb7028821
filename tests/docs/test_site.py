"""The site of `make docs`, as far as it can be known without a build: navigation and no outside request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    files = [ROOT / "mkdocs.yml", *(DOCS / "api").glob("*.css")]
    assert [path.name for path in files if re.search(r"https?://|url\(", path.read_text())] == []
    options = next(plugin["mkdocstrings"] for plugin in SITE["plugins"] if isinstance(plugin, dict))
    assert options["enable_inventory"] is False
    assert options["handlers"]["python"]["options"]["allow_inspection"] is False
