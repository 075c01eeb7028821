"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import sparing

FLOWER = importlib.util.find_spec("flwr") is not None  # modules of that extra cannot be imported without it
MODULES = [
    info.name
    for info in pkgutil.walk_packages(sparing.__path__, "sparing.")
    if not info.name.endswith("__main__") and (FLOWER or "federated.flower_" not in info.name)
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
