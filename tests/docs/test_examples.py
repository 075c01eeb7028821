"""Every example runs to its end on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.scripts import ran

# `test_notebook` runs the cells of the other one
EXAMPLES = sorted(
    path for path in (Path(__file__).parents[2] / "examples").glob("*.py") if path.name != "first_steps.py"
)


@pytest.mark.processes
@pytest.mark.slow  # a score of scripts
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path):
    assert (failed := ran(path, tmp_path)) is None, failed[-2000:]
