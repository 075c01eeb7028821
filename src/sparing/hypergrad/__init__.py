"""Hypergradients: how the end of a training run moves with what steered it, by any method behind one verb.

An inner run of T optimizer steps on g(θ, φ) ends at θ_T(φ); the hypergradient is that of the outer loss f(θ_T(φ), φ).
(FG)²U estimates it without bias in memory constant in T; beside it stand reverse unrolling, whole, checkpointed or
truncated, implicit methods, finite and zeroth-order differences. Every result reports how sure it is, and ``choose``
says in advance which method fits, what it costs and how exact it is.

Shen et al., "Memory-Efficient Gradient Unrolling for Large-Scale Bi-level Optimization", NeurIPS 2024
(arXiv:2406.14095).

    problem = Bilevel(inner=loss, outer=validation_loss, init=theta0, optimizer=SGD(lr=0.01, momentum=0.9), steps=100)
    result = hypergradient(problem, phi, ForwardGradient(directions=16), seed=0)
    result.grad, result.value, result.theta, result.report
"""

from sparing.hypergrad.apply import hypergradient, phases, solve
from sparing.hypergrad.checkpointed import Checkpointed as Checkpointed
from sparing.hypergrad.choose import choose
from sparing.hypergrad.directions import Coordinate as Coordinate
from sparing.hypergrad.directions import Gaussian as Gaussian
from sparing.hypergrad.directions import Hadamard as Hadamard
from sparing.hypergrad.directions import Orthonormal as Orthonormal
from sparing.hypergrad.directions import Rademacher as Rademacher
from sparing.hypergrad.directions import Sphere as Sphere
from sparing.hypergrad.forward import Forward as Forward
from sparing.hypergrad.forward import ForwardGradient as ForwardGradient
from sparing.hypergrad.implicit import ConjugateGradient as ConjugateGradient
from sparing.hypergrad.implicit import FiniteDifference as FiniteDifference
from sparing.hypergrad.implicit import HessianFree as HessianFree
from sparing.hypergrad.implicit import Neumann as Neumann
from sparing.hypergrad.models import stateless
from sparing.hypergrad.optimizers import SGD as SGD
from sparing.hypergrad.optimizers import Adam as Adam
from sparing.hypergrad.optimizers import AdamW as AdamW
from sparing.hypergrad.optimizers import cosine as cosine
from sparing.hypergrad.predict import predict
from sparing.hypergrad.problem import Bilevel, BlackBox
from sparing.hypergrad.reverse import Reverse as Reverse
from sparing.hypergrad.reverse import Truncated as Truncated
from sparing.hypergrad.spread import Spread as Spread
from sparing.hypergrad.stream import Stream
from sparing.hypergrad.zeroth import ZerothOrder as ZerothOrder

METHODS = (
    Checkpointed, ConjugateGradient, FiniteDifference, Forward, ForwardGradient, HessianFree, Neumann, Reverse,
    Truncated, ZerothOrder,
)  # fmt: skip
"""Methods: values of one protocol."""

LAWS = (Coordinate, Gaussian, Hadamard, Orthonormal, Rademacher, Sphere)
"""Laws of random directions."""

OPTIMIZERS = (SGD, Adam, AdamW)
"""Inner optimizers."""

__all__ = [
    "METHODS",
    "OPTIMIZERS",
    "Bilevel",
    "BlackBox",
    "Stream",
    "choose",
    "hypergradient",
    "phases",
    "predict",
    "solve",
    "stateless",
]
