"""The two discretizations of ``benchmarks.darcy`` agree with a closed form and with each other."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")
from benchmarks import darcy


def test_where_everything_conducts_alike_pressures_are_products_of_sines(monkeypatch: pytest.MonkeyPatch) -> None:
    """-Δp = 4 sin 2πx sin 2πy is solved by p = sin 2πx sin 2πy/(2π²); both schemes are of second order."""
    at = darcy.sensors()
    exact = np.outer(np.sin(2 * np.pi * at), np.sin(2 * np.pi * at)).ravel() / (2 * np.pi**2)
    monkeypatch.setattr(darcy, "truth", lambda x, y: np.zeros_like(x * y))
    for solver, coarse, fine in (
        (lambda n: darcy.volumes(np.zeros((8, 8)), n), 32, 64),
        (darcy.nodes, 31, 63),
    ):
        far = [np.abs(solver(n)[3] - exact).max() for n in (coarse, fine)]
        assert far[1] < 1e-4  # of at most 0.05
        assert far[0] / far[1] > 3  # four, but for where sensors lie between points


def test_on_the_true_field_the_two_approach_each_other() -> None:
    """Finite volumes with the field at cell centres, against finite differences on a far finer grid."""
    fine = darcy.nodes(255)
    far = [np.abs(darcy.volumes(darcy.true_cells(n).numpy(), n) - fine).max() / np.abs(fine).max() for n in (32, 64)]
    assert far[1] < 3e-3
    assert far[0] / far[1] > 3
