"""Solve an equation forward in time: Fourier collocation in space, scipy's adaptive integrators in time, float64.

Burgers and Allen–Cahn go through LSODA with their Jacobian, which turns implicit where the problem is stiff (ν near 10)
and explicit where it is not (ν near 0.003). KdV goes through DOP853 after an integrating factor exp(−ik³νt) has taken
the stiff linear part out; its product is dealiased by the 2/3 rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from sparing.errors import RunError, UserError
from sparing.jobs.invert.equations import Equation
from sparing.jobs.invert.spectral import LENGTH, Array, Spectrum, differentiation, points, wavenumbers

# |u| never grows for Burgers and Allen–Cahn, and stays below 3 max |u_0| for KdV
_GROWTH = 10
# a resolved run evaluates its rate some thousand times
_MOST_CALLS = 100_000
# points up to which the rate of a field is a product with matrices
_SMALL = 192


def integrator() -> Any:
    """The function ``scipy.integrate.solve_ivp``, or how to install it."""
    try:
        from scipy.integrate import solve_ivp
    except ImportError:
        why, do = "the solver steps through time with scipy", "pip install 'sparing[pde]', or pip install scipy"
        raise UserError("scipy", got="not installed", why=why, do=do) from None
    return solve_ivp


def solve(
    equation: Equation,
    coefficient: float | Array,
    times: Array,
    *,
    grid: int = 256,
    tolerance: float = 1e-8,
    initial: Array | None = None,
) -> Array:
    """The solution (m, grid) at rising times (m,), for a number ν or a field (grid,)."""
    nu = _checked(equation, coefficient, grid)
    start = np.asarray(equation.initial(points(grid)) if initial is None else initial, dtype=np.float64)
    span = (0.0, float(times[-1]))
    integrate = _dispersive if equation.dispersive else _parabolic
    with np.errstate(over="ignore", invalid="ignore"):
        found = integrate(equation, nu, start, span, np.asarray(times, dtype=np.float64), tolerance)
    if not np.isfinite(found).all():
        raise RunError(_failure(equation, nu, "the solution is not finite"))
    return found


def _checked(equation: Equation, coefficient: float | Array, grid: int) -> Array:
    nu = np.asarray(coefficient, dtype=np.float64)
    if nu.shape not in {(), (grid,)}:
        raise UserError("ν", got=f"shape {nu.shape}", why="it is a number or a field on the grid", do=f"pass ({grid},)")
    if nu.shape and equation.dispersive:
        why = "a field stands in a diffusion term only"
        raise UserError("ν", got=f"a field for {equation.name}", why=why, do="use burgers or allen-cahn, or a number")
    if not (np.isfinite(nu).all() and (nu > 0).all()):
        raise UserError("ν", got=f"{nu.min():g} at its least", why="it is positive and finite", do="pass such a ν")
    return nu


def _failure(equation: Equation, nu: Array, reason: str) -> str:
    ends = f"ν from {nu.min():g} to {nu.max():g}"
    return f"solver: {equation.name} with {ends}: {reason}; a finer grid or a larger ν is easier"


def _guarded(equation: Equation, nu: Array, rate: Callable[..., Any], start: Any) -> Callable[..., Any]:
    """A right side that stops a run which blows up or crawls, where an adaptive integrator would go on for hours."""
    highest, calls = _GROWTH * (1 + np.abs(start).max()), 0

    def guarded(t: float, u: Any) -> Any:
        nonlocal calls
        calls += 1
        # written so that NaN, which is not below anything, stops the run as well
        if calls > _MOST_CALLS or not np.abs(u).max() < highest:
            raise RunError(_failure(equation, nu, f"the solution is not resolved from t = {t:.3g} on"))
        return rate(t, u)

    return guarded


def _steps(equation: Equation, nu: Array, rate: Callable[..., Any], span: Any, start: Any, **options: Any) -> Any:
    """Values at the asked times, shape (points, times)."""
    solution = integrator()(_guarded(equation, nu, rate, start), span, start, **options)
    if not solution.success:
        raise RunError(_failure(equation, nu, str(solution.message).lower()))
    return solution.y


def between(nu: Array, grid: int) -> tuple[Array, Spectrum, Spectrum]:
    """What ∂x(ν ∂x u) needs for a field: the slope is taken half a cell to the right, where ν multiplies it.

    Returns ν there, and the factors of the transform that lead to the slope there and from the flux back.
    """
    # on the points themselves the highest wave has slope zero, so diffusion would never damp it; half a cell away it
    # has its full slope, and with a constant ν the operator is −νk² for every wave, as for a number
    waves = wavenumbers(grid)
    half = np.exp(0.5j * waves * LENGTH / grid)
    # interpolated in the logarithm, so that ν stays positive between the points
    middle = np.exp(np.fft.irfft(half * np.fft.rfft(np.log(nu)), n=grid))
    return middle, 1j * waves * half, 1j * waves / half


def diffusion(nu: Array, grid: int) -> Array:
    """The matrix (grid, grid) of u ↦ ∂x(ν ∂x u); symmetric, without positive eigenvalues."""
    if not nu.shape:
        return np.asarray(nu * differentiation(grid, 2))
    slope = _middle_slopes(grid)
    return np.asarray(-slope.T @ (between(nu, grid)[0][:, None] * slope))


@lru_cache(maxsize=4)
def _middle_slopes(grid: int) -> Array:
    """The matrix (grid, grid) from values to slopes half a cell to the right."""
    there = between(np.ones(grid), grid)[1]
    matrix = np.fft.irfft(there[:, None] * np.fft.rfft(np.eye(grid), axis=0), n=grid, axis=0)
    # shared by the cache
    matrix.flags.writeable = False
    return np.asarray(matrix)


def rates(equation: Equation, nu: Array, grid: int) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Right side and Jacobian of the semi-discrete equation u' = ∂x(ν ∂x u) − ∂x flux(u) + reaction(u)."""
    slope = 1j * wavenumbers(grid)
    # the highest wave has no sine on the grid
    slope[-1] = 0
    spread = 0 if nu.shape else -nu * wavenumbers(grid) ** 2
    if nu.shape and grid <= _SMALL:
        return _dense_rates(equation, nu, grid)
    if nu.shape:
        middle, there, back = between(nu, grid)
    # built when first asked for: LSODA wants the Jacobian only where the problem is stiff
    dense: list[Array] = []

    def rate(_: float, u: Array) -> Array:
        spectrum = np.fft.rfft(u)
        change = back * np.fft.rfft(middle * np.fft.irfft(there * spectrum, n=grid)) if nu.shape else spread * spectrum
        if equation.advects:
            change = change - slope * np.fft.rfft(0.5 * u * u)
        value = np.fft.irfft(change, n=grid)
        return np.asarray(value + 5 * (u - u**3) if equation.reacts else value)

    def jacobian(_: float, u: Array) -> Array:
        if not dense:
            dense.append(diffusion(nu, grid))
        value = dense[0] - differentiation(grid, 1) * u if equation.advects else dense[0].copy()
        if equation.reacts:
            value.flat[:: grid + 1] += 5 - 15 * u * u
        return np.asarray(value)

    return rate, jacobian


def _dense_rates(equation: Equation, nu: Array, grid: int) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """The same for a field on a small grid, where two products with matrices are faster than six transforms."""
    spread, slope = diffusion(nu, grid), differentiation(grid, 1)

    def rate(_: float, u: Array) -> Array:
        change = spread @ u
        if equation.advects:
            change = change - slope @ (0.5 * u * u)
        return np.asarray(change + 5 * (u - u**3) if equation.reacts else change)

    def jacobian(_: float, u: Array) -> Array:
        value = spread - slope * u if equation.advects else spread.copy()
        if equation.reacts:
            value.flat[:: grid + 1] += 5 - 15 * u * u
        return np.asarray(value)

    return rate, jacobian


def _parabolic(
    equation: Equation, nu: Array, start: Array, span: tuple[float, float], times: Array, tolerance: float
) -> Array:
    rate, jacobian = rates(equation, nu, len(start))
    values = _steps(
        equation, nu, rate, span, start,
        method="LSODA", jac=jacobian, t_eval=times, rtol=tolerance, atol=tolerance,
    )  # fmt: skip
    return np.ascontiguousarray(values.T)


def _dispersive(
    equation: Equation, nu: Array, start: Array, span: tuple[float, float], times: Array, tolerance: float
) -> Array:
    """û = exp(iνk³t) v̂, since −ν u_xxx has the symbol −ν(ik)³ = iνk³."""
    count = len(start)
    waves = wavenumbers(count)
    # the 2/3 rule: above it, products of waves alias
    kept = waves <= waves[-1] * 2 / 3
    turn = 1j * nu * waves**3
    factor = -0.5j * waves * kept

    def rate(t: float, turned: Spectrum) -> Spectrum:
        phase = np.exp(turn * t)
        u = np.fft.irfft(phase * turned, n=count)
        return np.asarray(factor * np.conj(phase) * np.fft.rfft(u * u))

    # an error per coefficient of the transform, which is `count` times that of a value
    turned = _steps(
        equation, nu, rate, span, np.fft.rfft(start) * kept,
        method="DOP853", t_eval=times, rtol=tolerance, atol=tolerance * np.sqrt(count),
    )  # fmt: skip
    return np.asarray(np.fft.irfft(np.exp(np.outer(times, turn)) * turned.T, n=count, axis=1))
