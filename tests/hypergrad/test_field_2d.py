"""The two discretizations of ``examples/field_2d.py`` agree with a closed form and with each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("scipy")
EXAMPLE = Path(__file__).parents[2] / "examples" / "field_2d.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("field_2d", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_everything_conducts_alike_pressures_are_products_of_sines(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-Δp = 4 sin 2πx sin 2πy is solved by p = sin 2πx sin 2πy/(2π²); both schemes are of second order."""
    at = example.sensors()
    exact = np.outer(np.sin(2 * np.pi * at), np.sin(2 * np.pi * at)).ravel() / (2 * np.pi**2)
    monkeypatch.setattr(example, "truth", lambda x, y: np.zeros_like(x * y))
    for solver, coarse, fine in (
        (lambda n: example.volumes(np.zeros((8, 8)), n), 32, 64),
        (example.nodes, 31, 63),
    ):
        far = [np.abs(solver(n)[3] - exact).max() for n in (coarse, fine)]
        assert far[1] < 1e-4  # of at most 0.05
        assert far[0] / far[1] > 3  # four, but for where sensors lie between points


def test_on_the_true_field_the_two_approach_each_other(example: ModuleType) -> None:
    """Finite volumes with the field at cell centres, against finite differences on a far finer grid."""
    fine = example.nodes(255)
    far = [
        np.abs(example.volumes(example.true_cells(n).numpy(), n) - fine).max() / np.abs(fine).max() for n in (32, 64)
    ]
    assert far[1] < 3e-3
    assert far[0] / far[1] > 3
