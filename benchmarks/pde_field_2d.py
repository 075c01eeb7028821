"""A field of two dimensions by least squares, beside Adam with as many solves; ``python -m benchmarks.pde_field_2d``.

The problem is that of ``benchmarks.darcy``: steady diffusion on a square, 144 sensors, four patterns of sources,
data from another discretization. Every run has its own draw of noise and its own first guess, a constant within a
factor of three. Adam follows 16 sampled directions a step under the penalty that least squares chose, at the best of
its rates by what it minimizes. The control is the best constant. About ten CPU minutes; rows that are done are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import darcy
from benchmarks.valley import store
from sparing import hypergrad as hg
from sparing.seeds import stream

RESULT = store.RESULTS / "pde_field_2d.json"
DRAWS = range(5)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
DIRECTIONS = 16
NOISE = 0.01
FITS: dict[str, dict[str, Any]] = {
    "16 × 16, 1 % noise": {},
    "8 × 8, 1 % noise": {"cells": 8},
    "16 × 16, no noise": {"noise": 0.0},
    "16 × 16, 1 % noise, discrepancy": {"penalty": "discrepancy"},
}
"""Label -> what differs."""


class Rows(store.Store):
    """Rows of ``pde_field_2d.json``."""

    def __init__(self) -> None:
        """Open the file with the rows it has."""
        self.path, self.command = RESULT, "python -m benchmarks.pde_field_2d"
        self.rows = self._read()


def posed(draw: int, *, cells: int = 16, noise: float = NOISE, **changes: Any) -> tuple[hg.Residuals, Tensor]:
    """The problem of a draw, and its first guess."""
    exact = darcy.nodes()
    drawn = torch.randn(exact.shape, generator=stream(draw, "noise"), dtype=torch.float64).numpy()
    problem = darcy.problem(exact + noise * np.abs(exact).max() * drawn)
    guess = math.log(3) * (2 * float(torch.rand((), generator=stream(draw, "guess"), dtype=torch.float64)) - 1)
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
    return hg.Residuals(**fields | changes), torch.full((cells, cells), guess, dtype=torch.float64)


def error(log_kappa: Tensor, cells: int = 16) -> float:
    """Relative L2 error of κ over the cells."""
    found, true = log_kappa.double().expand(cells, cells).exp(), darcy.true_cells(cells).exp()
    return float((found - true).norm() / true.norm())


def fitted(draw: int, **changes: Any) -> dict[str, Any]:
    """One fit by least squares."""
    problem, start = posed(draw, **changes)
    began = time.process_time()
    fit = hg.least_squares(problem, start, hg.GaussNewton())
    seconds, cells, (low, high) = time.process_time() - began, len(start), fit.interval(0.9)
    true = darcy.true_cells(cells)
    return {
        "error": error(fit.phi, cells), "guess": error(start, cells), "solves": fit.solves, "seconds": seconds,
        "covered": float(((low <= true) & (true <= high)).double().mean()), "freedom": fit.freedom,
        "penalty": fit.penalty, "misfit": float(fit.residuals.square().mean()), "value": fit.value,
        "ended": fit.ended, "unknowns": start.numel(),
    }  # fmt: skip


def constant(draw: int) -> dict[str, Any]:
    """The best constant, by least squares too."""
    problem, start = posed(draw)
    one = hg.Residuals(solve=lambda phi: problem.solve(phi.expand(16, 16)), residuals=problem.residuals)
    began = time.process_time()
    fit = hg.least_squares(one, start[0, :1], hg.GaussNewton())
    return {"error": error(fit.phi), "guess": error(start), "solves": fit.solves, "unknowns": 1,
        "seconds": time.process_time() - began, "misfit": float(fit.residuals.square().mean())}  # fmt: skip


def descended(draw: int, rate: float, solves: int, penalty: float) -> dict[str, Any]:
    """Adam on sampled differences, under a given penalty."""
    problem, phi = posed(draw)
    phi = phi.clone()

    def objective(u: Tensor, at: Tensor) -> Tensor:
        return problem.residuals(u, at).square().sum() + penalty * darcy.slopes(at).square().sum()

    box, adam = hg.BlackBox(solve=problem.solve, outer=objective), torch.optim.Adam([phi], lr=rate)
    method, steps, began = hg.ZerothOrder(directions=DIRECTIONS), solves // (2 * DIRECTIONS + 1), time.process_time()
    for step in range(steps):
        phi.grad = hg.hypergradient(box, phi, method, seed=1000 * draw + step).grad
        adam.step()
    end = float(objective(problem.solve(phi), phi))
    return {"error": error(phi), "value": end, "rate": rate, "solves": steps * (2 * DIRECTIONS + 1), "unknowns": 256,
        "seconds": time.process_time() - began}  # fmt: skip


def main() -> None:
    """Measure what is missing."""
    torch.set_num_threads(1)
    rows = Rows()

    def row(arm: str, label: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return rows.once(label, lambda: {"arm": arm, **measure()})

    for draw in DRAWS:
        row("best constant", f"best constant, {draw}", partial(constant, draw))
        for name, changes in FITS.items():
            made = row(name, f"{name}, {draw}", partial(fitted, draw, **changes))
            for rate in () if changes else RATES:
                again = partial(descended, draw, rate, int(made["solves"]), float(made["penalty"]))
                row("Adam", f"Adam {rate:g}, {draw}", again)


if __name__ == "__main__":
    main()
