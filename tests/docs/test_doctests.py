"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

FLOWER = importlib.util.find_spec("flwr") is not None  # modules of that extra cannot be imported without it
ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")
    for home, name in ((ROOT / "src", "sparing"), (ROOT, "benchmarks"))
    for path in sorted((home / name).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8") and (FLOWER or "flower" not in path.parts)
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert result.failed == 0
