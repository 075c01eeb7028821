"""A second discretization, which makes observations: conservative finite differences and fixed Runge–Kutta steps.

It shares no code with the spectral solver that an inversion runs, so that the inversion meets errors which are not its
own. Slopes and fluxes stand half a cell beside the points; each grid errs by the square of its spacing, and two grids
are combined so that the leading error cancels (Richardson).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sparing.jobs.invert.equations import Equation
from sparing.jobs.invert.spectral import LENGTH, Array, interpolation, points

# of the classical Runge–Kutta method on the negative and on the imaginary axis, less a margin
_REAL, _IMAGINARY = 2.5, 2.6
_LONGEST = 2e-3  # step that follows reaction and shock, whatever stability allows


def differenced(
    equation: Equation, coefficient: Callable[[Array], Array], times: Array, where: Array, *, grid: int
) -> Array:
    """The solution (m, n) at rising times and any positions, on ``grid`` and 2 · ``grid`` points.

    ``coefficient`` gives ν at positions; a number is a function that gives it everywhere.
    """
    coarse, fine = (_march(equation, coefficient, times, count) for count in (grid, 2 * grid))
    # the coarse points are every other fine one
    best = (4 * fine[:, ::2] - coarse) / 3
    return np.asarray(best @ interpolation(grid, where).T)


def _march(equation: Equation, coefficient: Callable[[Array], Array], times: Array, count: int) -> Array:
    """U (m, count) at the times."""
    x, width = points(count), LENGTH / count
    nu = np.broadcast_to(np.asarray(coefficient(x + width / 2), dtype=np.float64), x.shape)
    rate, stiff = _rate(equation, nu, width)
    u = np.asarray(equation.initial(x), dtype=np.float64)
    steps = int(np.ceil(times[-1] / min(_LONGEST, stiff)))
    step, found, row = times[-1] / steps, np.empty((len(times), count)), 0
    slope = rate(u)
    for number in range(steps):
        after = _runge_kutta(rate, u, slope, step)
        later = rate(after)
        # between the ends of a step by the cubic that has their values and slopes
        while row < len(times) and (times[row] <= (number + 1) * step or number == steps - 1):
            part = times[row] / step - number
            found[row] = _between(part, step, (u, slope), (after, later))
            row += 1
        u, slope = after, later
    return found


def _runge_kutta(rate: Callable[[Array], Array], u: Array, slope: Array, step: float) -> Array:
    """The classical method of order 4, from a state and its slope."""
    second = rate(u + step / 2 * slope)
    third = rate(u + step / 2 * second)
    return u + step / 6 * (slope + 2 * second + 2 * third + rate(u + step * third))


def _between(part: float, step: float, here: Sequence[Array], there: Sequence[Array]) -> Array:
    """Hermite's cubic at ``part`` of a step, from 0 to 1."""
    rest = 1 - part
    ends = rest**2 * (1 + 2 * part) * here[0] + part**2 * (1 + 2 * rest) * there[0]
    return np.asarray(ends + step * part * rest * (rest * here[1] - part * there[1]))


def _rate(equation: Equation, nu: Array, width: float) -> tuple[Callable[[Array], Array], float]:
    """Right side on a periodic grid, ν half a cell to the right, and the longest stable step."""

    def right(u: Array) -> Array:
        return np.concatenate([u[1:], u[:1]])

    def left(u: Array) -> Array:
        return np.concatenate([u[-1:], u[:-1]])

    def rate(u: Array) -> Array:
        after = right(u)
        if equation.dispersive:
            bend = (after - 2 * u + left(u)) / width**2
            flux = nu * (bend + right(bend)) / 2
        else:
            flux = -nu * (after - u) / width
        if equation.advects:
            # this mean of u²/2 over a face keeps Σ u² (Tadmor 1984; Zabusky & Kruskal 1965)
            flux = flux + (u * u + u * after + after * after) / 6
        change = (left(flux) - flux) / width
        return np.asarray(change + 5 * (u - u**3) if equation.reacts else change)

    # the largest factors of the third and the second difference: 3√3/2 /h³ and 4/h²
    stiff = _IMAGINARY / (2.6 * nu.max() / width**3) if equation.dispersive else _REAL / (4 * nu.max() / width**2)
    return rate, min(stiff, _IMAGINARY * width / 4 if equation.advects else np.inf)
