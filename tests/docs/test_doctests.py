"""The examples in docstrings are executed."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import sparing

MODULES = [
    info.name for info in pkgutil.walk_packages(sparing.__path__, "sparing.") if not info.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
