"""No number in the results is typed by hand: the tables are what the committed JSON makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


def test_tables_are_made_from_the_committed_json():
    from benchmarks.results import pages

    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make results`"


def test_results_name_how_they_were_made():
    """Each file of results carries the command and the versions."""
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        text = path.read_text()
        assert '"command"' in text, path.name
        assert '"torch"' in text, path.name
