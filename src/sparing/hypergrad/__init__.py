"""Hypergradients: how the end of a training run moves with what steered it, by any method behind one verb.

An inner run of T optimizer steps on g(θ, φ) ends at θ_T(φ); the hypergradient is that of the outer loss f(θ_T(φ), φ).
(FG)²U estimates it without bias in memory constant in T; beside it stand reverse unrolling, whole, checkpointed or
truncated, implicit methods, finite and zeroth-order differences. Every result reports how sure it is, and ``choose``
says in advance which method fits, what it costs and how exact it is. Where the outer loss is a sum of squares of a few
hundred unknowns, ``least_squares`` takes the whole Jacobian instead.

Shen et al., "Memory-Efficient Gradient Unrolling for Large-Scale Bi-level Optimization", NeurIPS 2024
(arXiv:2406.14095).

Example:
    >>> import torch
    >>> problem = Bilevel(
    ...     inner=lambda theta, phi, batch: ((theta - phi) ** 2).sum(),
    ...     outer=lambda theta, phi: theta.sum(),
    ...     init=torch.zeros(3),
    ...     optimizer=SGD(lr=0.25),
    ...     steps=2,
    ... )
    >>> hypergradient(problem, torch.ones(3), Reverse()).grad
    tensor([0.7500, 0.7500, 0.7500])
    >>> hypergradient(problem, torch.ones(3), ForwardGradient(directions=16), seed=0).report.directions
    16
"""

from sparing.hypergrad.apply import hypergradient, phases, solve
from sparing.hypergrad.attribution.influence import attribute
from sparing.hypergrad.attribution.smoothness import metasmoothness
from sparing.hypergrad.attribution.training import TrainingRun
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.fitting.gauss_newton import GaussNewton, least_squares
from sparing.hypergrad.fitting.residuals import Residuals
from sparing.hypergrad.forward import Forward, ForwardGradient
from sparing.hypergrad.forward_mode.directions import Coordinate, Gaussian, Hadamard, Orthonormal, Rademacher, Sphere
from sparing.hypergrad.implicit import ConjugateGradient, FiniteDifference, HessianFree, Neumann
from sparing.hypergrad.models import stateless
from sparing.hypergrad.optimizers import SGD, Adam, AdamW, cosine
from sparing.hypergrad.planning.choose import choose
from sparing.hypergrad.planning.predict import predict
from sparing.hypergrad.problem import Bilevel, BlackBox
from sparing.hypergrad.reverse import Reverse, Truncated
from sparing.hypergrad.spread import Spread
from sparing.hypergrad.stream import Stream
from sparing.hypergrad.zeroth import ZerothOrder

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Bilevel",
    "BlackBox",
    "Checkpointed",
    "ConjugateGradient",
    "Coordinate",
    "FiniteDifference",
    "Forward",
    "ForwardGradient",
    "GaussNewton",
    "Gaussian",
    "Hadamard",
    "HessianFree",
    "Neumann",
    "Orthonormal",
    "Rademacher",
    "Residuals",
    "Reverse",
    "Sphere",
    "Spread",
    "Stream",
    "TrainingRun",
    "Truncated",
    "ZerothOrder",
    "attribute",
    "choose",
    "cosine",
    "hypergradient",
    "least_squares",
    "metasmoothness",
    "phases",
    "predict",
    "solve",
    "stateless",
]
