"""Find a field of two dimensions through a solver without derivatives: how well each part of a square conducts.

``-∇·(κ∇p) = f`` with p = 0 on the edge, for four patterns of sources f; log κ has one unknown for each of 8 × 8 parts.
What is observed is p at 144 sensors, from a grid twice as fine, with noise of 1 % of its largest value. About 5 s.
"""

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu

from sparing import hypergrad as hg

CELLS, SENSORS = 8, 12


def centres(n):
    """Centres of n × n cells of the unit square."""
    return np.meshgrid(*[(np.arange(n) + 0.5) / n] * 2, indexing="ij")


def truth(x, y):
    """The field to find: a slow channel and a fast spot, log κ from -1.2 to 1.1."""
    slow = np.exp(-(((y - 0.35 - 0.2 * np.sin(3 * x)) / 0.13) ** 2))
    return 1.1 * np.exp(-((x - 0.7) ** 2 + (y - 0.72) ** 2) / 0.03) - 1.2 * slow


def pressures(kappa):
    """Finite volumes: p at the sensors, (4, SENSORS²), from κ of n × n cells."""
    n, (x, y) = len(kappa), centres(len(kappa))
    number = np.arange(n * n).reshape(n, n)
    here = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    there = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    flat = kappa.ravel()
    flow = 2 * n**2 / (1 / flat[here] + 1 / flat[there])  # through the face between two cells
    between = sparse.coo_matrix((-flow, (here, there)), (n * n, n * n))
    between = between + between.T
    edge = np.zeros((n, n))
    for side in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        edge[side] += 2 * n**2 * kappa[side]  # half a cell away
    matrix = between + sparse.diags(edge.ravel() - np.asarray(between.sum(1)).ravel())
    sine, other = np.sin(2 * np.pi * x), np.sin(2 * np.pi * y)
    sources = np.stack([np.ones_like(x), 2 * sine, 2 * other, 4 * sine * other]).reshape(4, -1)
    p = splu(matrix.tocsc()).solve(sources.T).T.reshape(4, n, n)
    at = np.arange(1, SENSORS + 1) / (SENSORS + 1) * n - 0.5
    low, part = at.astype(int), at % 1
    p = (1 - part)[:, None] * p[:, low] + part[:, None] * p[:, low + 1]
    return ((1 - part) * p[:, :, low] + part * p[:, :, low + 1]).reshape(4, -1)


def solve(log_kappa):
    """What the library calls: 32 × 32 cells for 8 × 8 unknowns."""
    return torch.from_numpy(pressures(np.exp(np.kron(log_kappa.numpy(), np.ones((4, 4))))))


def roughness(log_kappa):
    """The prior: second differences along both sides, and mixed ones."""
    across, along = log_kappa.diff(n=2, dim=0), log_kappa.diff(n=2, dim=1)
    return torch.cat([across.flatten(), along.flatten(), 2**0.5 * log_kappa.diff(dim=0).diff(dim=1).flatten()])


exact = pressures(np.exp(truth(*centres(64))))
size = 0.01 * np.abs(exact).max()
observed = torch.from_numpy(exact + size * np.random.default_rng(0).standard_normal(exact.shape))
problem = hg.Residuals(solve=solve, residuals=lambda p, phi: ((p - observed) / size).flatten(), prior=roughness)
start = torch.zeros(CELLS, CELLS, dtype=torch.float64)
fit = hg.least_squares(problem, start, hg.GaussNewton())

true, (low, high) = torch.from_numpy(truth(*centres(CELLS))), fit.interval(0.9)
error = (fit.phi.exp() - true.exp()).norm() / true.exp().norm()
blind = (1 - true.exp()).norm() / true.exp().norm()
held = ((low <= true) & (true <= high)).double().mean()
print(f"κ is {error:.1%} off after {fit.solves} solves in {fit.seconds:.0f} s, and was {blind:.0%} off at first")
print(f"90 % intervals hold {held:.0%} of the values; the sensors decide {fit.freedom:.0f} of {true.numel()}")
