"""Verbs that open models, under every idiom: the work, equal to what the run's own file says, or one line to follow."""

from __future__ import annotations

from typing import Any

import pytest

from idioms.cli.cells import CELLS, READS_MODELS
from idioms.cli.judged import judge, told
from idioms.table import Cell

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # a fork for each cell


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told(READS_MODELS, tmp_path_factory.mktemp("idioms"))


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.subject in READS_MODELS], ids=lambda cell: cell.name)
def test_cell(cell: Cell, found: dict[str, Any]) -> None:
    judge(cell, found[cell.name])
