"""What two models' weights say about their average before it is evaluated: a few numbers, larger is worse.

Every number is 0 for equal models. Signs are corrected for chance: unrelated models are near 1 whatever their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.valley.agreement import Agreement, compare_signs
from sparing.valley.compatible import Model, vectors_of
from sparing.vectors import Vector, axpy, dot, norm

# Features of the two models alone. Matrices are tensors of two or more dimensions, or all if there are none: scales of
# norm layers agree in sign whatever they have learned.
FEATURES: Mapping[str, str] = {
    "disagreement": "1 − chance-corrected agreement of the weights' signs, all matrices together",
    "layers": "the same, as the mean over matrices: each layer counts alike",
    "worst": "the same, of the matrix where it is largest",
    "flips": "1 − magnitude-weighted sign agreement",
    "distance": "‖a − b‖ / √(‖a‖ ‖b‖)",
    "shrinkage": "mean over matrices of 1 − 2 ‖(a + b)/2‖ / (‖a‖ + ‖b‖): how far averaging shortens weights",
}

# Features that need the common base too
TASK_FEATURES: Mapping[str, str] = {
    "update": "(‖a − base‖ + ‖b − base‖) / (2 ‖base‖): how far both have gone",
    "task_disagreement": "1 − chance-corrected agreement of the task vectors' signs",
    "task_angle": "1 − cosine of the task vectors",
}


def features_of(a: Model, b: Model, base: Model | None = None) -> dict[str, float]:
    """Measure how far two models are apart, in the senses of ``FEATURES`` and, with a base, ``TASK_FEATURES``."""
    first, second, *ancestor = vectors_of(a, b, *([] if base is None else [base]))
    mine, theirs = matrices_of(first), matrices_of(second)
    signs = compare_signs(mine, theirs, by="tensor")
    shrinkage = _mean([_shrinkage(value, theirs[name]) for name, value in mine.items() if value.any()])
    norms, difference = (float(norm(mine)), float(norm(theirs))), float(norm(axpy(-1.0, mine, theirs)))
    found = distance_features(signs, norms, difference, shrinkage)
    if ancestor:
        origin = matrices_of(ancestor[0])
        a, b = axpy(-1.0, origin, mine), axpy(-1.0, origin, theirs)
        lengths = float(norm(a)), float(norm(b))
        found |= task_features(compare_signs(a, b), lengths, float(dot(a, b)), float(norm(origin)))
    return found


def distance_features(
    signs: Agreement, norms: tuple[float, float], difference: float, shrinkage: float
) -> dict[str, float]:
    """Compute ``FEATURES`` from sign agreement by tensor, ‖a‖ and ‖b‖, ‖a − b‖ and the mean shrinkage."""
    layers = [disagreement(one) for one in signs.groups.values() if not math.isnan(one.corrected)]
    size = math.sqrt(norms[0] * norms[1])
    return {
        "disagreement": disagreement(signs),
        "layers": _mean(layers),
        "worst": max(layers, default=math.nan),
        "flips": 1 - signs.weighted,
        "distance": difference / size if size else math.nan,
        "shrinkage": shrinkage,
    }


def task_features(signs: Agreement, lengths: tuple[float, float], inner: float, size: float) -> dict[str, float]:
    """Compute ``TASK_FEATURES`` from the task vectors' sign agreement, norms and inner product, and ‖base‖."""
    product = lengths[0] * lengths[1]
    return {
        "update": sum(lengths) / (2 * size) if size else math.nan,
        "task_disagreement": disagreement(signs),
        "task_angle": 1 - inner / product if product else math.nan,
    }


def disagreement(signs: Agreement) -> float:
    """Return 1 − corrected agreement: 0 for equal signs, about 1 for unrelated models."""
    return 1 - signs.corrected


def matrices_of(vector: Vector) -> dict[str, Tensor]:
    """Return the tensors of two or more dimensions, or all if there are none."""
    return {name: value for name, value in vector.items() if value.ndim > 1} or dict(vector)


def _shrinkage(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.to(a.device).double()
    norms = [float(torch.linalg.vector_norm(one)) for one in (a, b, (a + b) / 2)]
    return 1 - 2 * norms[2] / (norms[0] + norms[1])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
