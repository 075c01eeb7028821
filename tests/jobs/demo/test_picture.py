"""The picture of the README: small, from a whole demo of the scale that is meant, its numbers beside it."""

from __future__ import annotations

import json
from pathlib import Path

from sparing.jobs.demo.settings import NAMES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "pictures"


def test_the_readmes_picture_comes_with_its_numbers_and_where_they_are_from():
    assert "(docs/pictures/overview.png)" in (ROOT / "README.md").read_text().partition("## Five calls")[0]
    assert (FOLDER / "overview.png").stat().st_size <= 300 * 1024
    stored = json.loads((FOLDER / "overview.json").read_text())
    assert list(stored["rows"]) == list(NAMES)
    assert stored["settings"]["scale"] == "small"
    assert stored["environment"]["command"].startswith("sparing demo")
    assert stored["environment"]["commit"]
