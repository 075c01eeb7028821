"""The site of `make docs`, as far as it can be known without a build: navigation, public names, no outside request."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
ROOMS = ("hypergrad", "scaling", "layersample", "sharding", "valley", "federated")
NAMES = re.compile(r"^::: sparing\.([\w.]+)$", re.MULTILINE)


def public(room: str) -> set[str]:
    """What a room exports: ``__all__``, names imported as themselves, and tuples of them."""
    found: set[str] = set()
    for node in ast.parse((ROOT / "src" / "sparing" / room / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found |= set(ast.literal_eval(node.value)) if name == "__all__" else {name}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_page_of_the_api_has_each_public_name_once(room: str):
    listed = NAMES.findall((DOCS / "api" / f"{room}.md").read_text())
    assert sorted(listed) == sorted(read_as(room, name) for name in public(room))


def read_as(room: str, name: str) -> str:
    """Where the reader of sources finds a name: beside a module of that name it would take the module."""
    module = ROOT / "src" / "sparing" / room / f"{name}.py"
    inside = module.exists() and f"\ndef {name}(" in module.read_text()
    return f"{room}.{name}.{name}" if inside else f"{room}.{name}"


def test_the_ground_has_its_public_names_once():
    listed = NAMES.findall((DOCS / "api" / "ground.md").read_text())
    assert len(listed) == len(set(listed))
    for room in ("memory", "report", "data", "blocks"):
        assert {name for name in listed if name.startswith(f"{room}.")} == {
            read_as(room, name) for name in public(room)
        }


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
