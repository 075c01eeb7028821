"""Fourier collocation on [−1, 1): points, derivatives, interpolation. The endpoint x = 1 is x = −1 and kept once."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from sparing.errors import UserError

Array = npt.NDArray[np.float64]
Spectrum = npt.NDArray[np.complex128]

LENGTH: Final = 2.0  # period of every function here


def points(count: int) -> Array:
    """Collocation points x_j = −1 + 2j/count, (count,); an even number, at least 8.

    Example:
        >>> points(8).tolist()
        [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75]
    """
    if count < 8 or count % 2:
        raise UserError("grid", got=count, why="a Fourier grid here has an even number of points", do="pass 8, 10, …")
    return -1 + LENGTH * np.arange(count) / count


def wavenumbers(count: int) -> Array:
    """The wavenumbers πm of the half spectrum of a real function, m = 0 … count/2 (radians per unit of length)."""
    return np.asarray(2 * np.pi / LENGTH * np.arange(count // 2 + 1), dtype=np.float64)


@lru_cache(maxsize=32)
def differentiation(count: int, order: int = 1) -> Array:
    """The matrix (count, count) that differentiates the interpolating trigonometric polynomial.

    Source: Trefethen 2000, Spectral Methods in MATLAB, chapter 3.
    """
    factor = (1j * wavenumbers(count)) ** order
    # the highest wave has no sine on the grid: its odd derivatives are taken to be zero
    if order % 2:
        factor[-1] = 0
    matrix = np.fft.irfft(factor[:, None] * np.fft.rfft(np.eye(count), axis=0), n=count, axis=0)
    # shared by the cache
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=8)
def roughness_rows(count: int, order: int) -> Array:
    """The matrix (count, count) from values to their derivative ∂x^order over π^(order − 1).

    So the longest wave counts alike at every order. Odd orders stand half a cell to the right, where the highest wave
    does not vanish.
    """
    waves = wavenumbers(count)
    factor = (1j * waves) ** order / (2 * np.pi / LENGTH) ** (order - 1)
    if order % 2:
        factor = factor * np.exp(0.5j * waves * LENGTH / count)
    matrix = np.fft.irfft(factor[:, None] * np.fft.rfft(np.eye(count), axis=0), n=count, axis=0)
    # shared by the cache
    matrix.flags.writeable = False
    return np.asarray(matrix)


def interpolation(count: int, where: Array) -> Array:
    """The matrix (m, count) that evaluates the interpolating trigonometric polynomial at positions (m,).

    Example:
        >>> import numpy as np
        >>> wave = np.sin(np.pi * points(16))
        >>> bool(np.allclose(interpolation(16, np.array([0.3])) @ wave, np.sin(0.3 * np.pi), atol=1e-14))
        True
    """
    offset = np.asarray(where, dtype=np.float64)[:, None] - points(count)[None, :]
    total = np.ones_like(offset)
    for wave in wavenumbers(count)[1:-1]:
        total += 2 * np.cos(wave * offset)
    total += np.cos(wavenumbers(count)[-1] * offset)
    return total / count
