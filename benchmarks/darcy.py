"""Steady diffusion on the unit square, ``-∇·(κ∇p) = f`` with p = 0 on the edge, by two discretizations.

Finite volumes are the solver of a fit, with one unknown log κ for each cell or square of cells; data come from finite
differences at the nodes of a finer grid.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu

from sparing import hypergrad as hg

SENSORS = 12
"""Sensors along each side of the square, inside it (count)."""


def sources(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Four patterns at points of the unit square: uniform, along x, along y, and in checkers; shape (4, points)."""
    return np.stack([np.ones_like(x), 2 * np.sin(2 * np.pi * x), 2 * np.sin(2 * np.pi * y),
        4 * np.sin(2 * np.pi * x) * np.sin(2 * np.pi * y)])  # fmt: skip


def truth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log κ at points: a slow channel across the square and a fast spot, from 0.3 to 3."""
    channel = -1.2 * np.exp(-(((y - 0.35 - 0.2 * np.sin(3 * x)) / 0.13) ** 2))
    return channel + 1.1 * np.exp(-((x - 0.7) ** 2 + (y - 0.72) ** 2) / 0.03)


def between(faces: np.ndarray, spacing: float, edge: np.ndarray) -> sparse.csc_matrix:
    """The matrix of Σ κ_f (p - p_neighbour)/h² from κ on faces: (2, n, n) towards +x and +y, and the edge's own."""
    n = len(edge)
    number = np.arange(n * n).reshape(n, n)
    here = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    there = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    strength = np.concatenate([faces[0, :-1].ravel(), faces[1, :, :-1].ravel()]) / spacing**2
    off = sparse.coo_matrix((-strength, (here, there)), (n * n, n * n))
    off = off + off.T
    own = -np.asarray(off.sum(axis=1)).ravel() + edge.ravel() / spacing**2
    return (off + sparse.diags(own)).tocsc()


def reader(places: np.ndarray, n: int, first: float, spacing: float) -> sparse.csr_matrix:
    """Bilinear interpolation from an n × n grid to the sensors; rows (SENSORS², n²)."""
    at = np.clip((places - first) / spacing, 0, n - 1 - 1e-9)
    low = at.astype(int)
    part = at - low
    one = sparse.lil_matrix((len(places), n))
    for row, (k, t) in enumerate(zip(low, part, strict=True)):
        one[row, k], one[row, k + 1] = 1 - t, t
    return sparse.kron(one, one).tocsr()


def volumes(log_kappa: np.ndarray, n: int = 32) -> np.ndarray:
    """Pressures at the sensors by finite volumes on n × n cells, harmonic means on faces; shape (4, SENSORS²)."""
    scale = n // len(log_kappa)
    kappa = np.exp(np.kron(log_kappa, np.ones((scale, scale))))
    faces = np.zeros((2, n, n))
    faces[0, :-1] = 2 / (1 / kappa[:-1] + 1 / kappa[1:])
    faces[1, :, :-1] = 2 / (1 / kappa[:, :-1] + 1 / kappa[:, 1:])
    edge = np.zeros((n, n))  # half a cell to the edge: twice the strength
    edge[0] += 2 * kappa[0]
    edge[-1] += 2 * kappa[-1]
    edge[:, 0] += 2 * kappa[:, 0]
    edge[:, -1] += 2 * kappa[:, -1]
    x, y = np.meshgrid((np.arange(n) + 0.5) / n, (np.arange(n) + 0.5) / n, indexing="ij")
    pressure = splu(between(faces, 1 / n, edge)).solve(sources(x.ravel(), y.ravel()).T)
    return (reader(sensors(), n, 0.5 / n, 1 / n) @ pressure).T


def nodes(n: int = 95) -> np.ndarray:
    """The same from the true field by finite differences at n × n inner nodes, κ taken between them."""
    h = 1 / (n + 1)
    at = np.arange(1, n + 1) * h
    x, y = np.meshgrid(at, at, indexing="ij")
    faces = np.exp(np.stack([truth(x + h / 2, y), truth(x, y + h / 2)]))
    edge = np.zeros((n, n))
    edge[0] += np.exp(truth(x - h / 2, y))[0]
    edge[-1] += faces[0, -1]
    edge[:, 0] += np.exp(truth(x, y - h / 2))[:, 0]
    edge[:, -1] += faces[1, :, -1]
    pressure = splu(between(faces, h, edge)).solve(sources(x.ravel(), y.ravel()).T)
    return (reader(sensors(), n, h, h) @ pressure).T


def sensors() -> np.ndarray:
    """Positions along a side."""
    return np.arange(1, SENSORS + 1) / (SENSORS + 1)


def slopes(log_kappa: torch.Tensor) -> torch.Tensor:
    """The prior: second differences along both sides, and the mixed ones, so that no direction is preferred."""
    across, along = log_kappa.diff(n=2, dim=0), log_kappa.diff(n=2, dim=1)
    mixed = 2**0.5 * log_kappa.diff(dim=0).diff(dim=1)
    return torch.cat([across.flatten(), along.flatten(), mixed.flatten()])


def problem(observed: np.ndarray) -> hg.Residuals:
    """Least squares in units of one per cent of the largest pressure."""
    seen, unit = torch.from_numpy(observed), 0.01 * float(np.abs(observed).max())
    return hg.Residuals(
        solve=lambda phi: torch.from_numpy(volumes(phi.double().numpy())),
        residuals=lambda u, phi: ((u - seen) / unit).flatten(),
        prior=slopes,
    )


def true_cells(cells: int) -> torch.Tensor:
    """Log κ at the centres of the cells that are fitted."""
    at = (np.arange(cells) + 0.5) / cells
    return torch.from_numpy(truth(*np.meshgrid(at, at, indexing="ij")))
