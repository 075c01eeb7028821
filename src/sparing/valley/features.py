"""What two models' weights say about their average before anyone evaluates it: a few numbers, larger is worse.

Every number is 0 for equal models. Signs come corrected for chance, so that strangers are near 1 whatever their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.valley.agreement import Agreement, compare_signs
from sparing.valley.compatible import Model, vectors_of
from sparing.vectors import Vector, axpy, dot, norm

# numbers that need the two models only. Matrices are tensors of two dimensions and more, or all if there are none:
# scales of norm layers agree in sign whatever they have learned.
FEATURES: Mapping[str, str] = {
    "disagreement": "1 − chance-corrected agreement of the weights' signs, all matrices together",
    "layers": "the same, as the mean over matrices: each layer counts alike",
    "worst": "the same, of the matrix where it is largest",
    "flips": "1 − magnitude-weighted sign agreement",
    "distance": "‖a − b‖ / √(‖a‖ ‖b‖)",
    "shrinkage": "mean over matrices of 1 − 2 ‖(a + b)/2‖ / (‖a‖ + ‖b‖): how far averaging shortens weights",
}

# numbers that need the common base too
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
    layers = [disagreement(one) for one in signs.groups.values() if not math.isnan(one.corrected)]
    sizes = math.sqrt(float(norm(mine)) * float(norm(theirs)))
    found = {
        "disagreement": disagreement(signs),
        "layers": _mean(layers),
        "worst": max(layers, default=math.nan),
        "flips": 1 - signs.weighted,
        "distance": float(norm(axpy(-1.0, mine, theirs))) / sizes if sizes else math.nan,
        "shrinkage": _mean([_shrinkage(value, theirs[name]) for name, value in mine.items() if value.any()]),
    }
    return found | (_task_features(mine, theirs, matrices_of(ancestor[0])) if ancestor else {})


def disagreement(signs: Agreement) -> float:
    """Return 1 − corrected agreement: 0 for equal signs, about 1 for strangers."""
    return 1 - signs.corrected


def matrices_of(vector: Vector) -> dict[str, Tensor]:
    """Return the tensors of two dimensions and more, or all if there are none."""
    return {name: value for name, value in vector.items() if value.ndim > 1} or dict(vector)


def _task_features(a: Vector, b: Vector, base: Vector) -> dict[str, float]:
    mine, theirs = axpy(-1.0, base, a), axpy(-1.0, base, b)
    lengths, size = (float(norm(mine)), float(norm(theirs))), float(norm(base))
    product = lengths[0] * lengths[1]
    return {
        "update": sum(lengths) / (2 * size) if size else math.nan,
        "task_disagreement": disagreement(compare_signs(mine, theirs)),
        "task_angle": 1 - float(dot(mine, theirs)) / product if product else math.nan,
    }


def _shrinkage(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.to(a.device).double()
    norms = [float(torch.linalg.vector_norm(one)) for one in (a, b, (a + b) / 2)]
    return 1 - 2 * norms[2] / (norms[0] + norms[1])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
