"""What is known of the true solution: a few values of it, and for the final judgement all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sparing.jobs.invert.differences import differenced
from sparing.jobs.invert.equations import Equation, burgers
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import Array, points
from sparing.seeds import stream

TIMES: Final = 512  # of the grid on which a solution is judged (count); the paper's
FIELD: Final = {"burgers": 0.05, "allen-cahn": 0.01}  # geometric mean of the true ν(x) (length²/time)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Observations and the truth behind them."""

    times: Array  # when it was observed, (m,)
    where: Array  # at which positions, (n,)
    values: Tensor  # what was seen, (m, n), float64
    grid_times: Array  # of the judging grid, (512,)
    solution: Array  # the true u there, (512, grid)
    coefficient: Array  # the true ν, () or (grid,)


def midpoints(count: int, low: float, high: float) -> Array:
    """The middles (count,) of equal cells: none at an end, so no periodic endpoint is kept twice.

    Example:
        >>> midpoints(4, -1, 1).tolist()
        [-0.75, -0.25, 0.25, 0.75]
    """
    return low + (high - low) * (np.arange(count) + 0.5) / count


def true_field(equation: Equation, where: Array) -> Array:
    """The coefficient ν(x) to be found: smooth, periodic, a factor of 5 between its ends."""
    return np.asarray(FIELD[equation.name] * np.exp(0.6 * np.sin(np.pi * where) + 0.3 * np.cos(3 * np.pi * where)))


def reference(equation: Equation, *, field: bool, times: Array, where: Array, grid: int) -> Array:
    """The true solution (m, n), by another discretization than that of the inversion.

    Burgers with one ν by its closed form; the others by finite differences on at least twice as many points. So what
    the inversion finds carries the errors of its own discretization, and is not rewarded for them.
    """
    if equation.name == "burgers" and not field:
        return burgers(equation.truth, times, where)

    def nu(at: Array) -> Array:
        return true_field(equation, at) if field else np.full_like(at, equation.truth)

    # twice as many again are used within; a small diffusion needs more points, and lets them be cheap
    fine = max(2 * grid, 256 if field or equation.dispersive else 512)
    return differenced(equation, nu, times, where, grid=fine)


def observe(settings: Settings) -> Inputs:
    """The observations, at the middles of equal cells of [0, 1] × [−1, 1], and the truth."""
    equation, (rows, columns) = settings.model, settings.observed
    seen, judged = midpoints(rows, 0, 1), np.linspace(0, 1, TIMES)
    where, grid = midpoints(columns, -1, 1), points(settings.points)
    # one solve serves observations and judgement
    times = np.unique(np.concatenate([seen, judged]))
    whole = reference(
        equation, field=bool(settings.field), times=times, where=np.concatenate([where, grid]), grid=settings.points
    )
    values = torch.from_numpy(whole[np.searchsorted(times, seen), :columns].copy())
    if settings.noise:
        # the noise is the same for every seed of a run, which differ in guess and directions
        drawn = torch.randn(values.shape, generator=stream(settings.draw, "noise"), dtype=values.dtype)
        values = values + settings.noise * drawn
    truth = true_field(equation, grid) if settings.field else np.asarray(equation.truth)
    return Inputs(seen, where, values, judged, whole[np.searchsorted(times, judged), columns:], truth)


def relative(found: Array, truth: Array) -> float:
    """‖found − truth‖₂ / ‖truth‖₂: of a number, its relative error.

    Example:
        >>> import numpy as np
        >>> relative(np.array([1.1]), np.array([1.0])).__round__(6)
        0.1
    """
    return float(np.linalg.norm(np.asarray(found) - truth) / np.linalg.norm(truth))
