"""What damages, kills and fills is that of ``benchmarks.trust``; these tests run a small part of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The loggers of other libraries as they were."""
    level = logging.getLogger("transformers").level
    yield
    logging.getLogger("transformers").setLevel(level)
