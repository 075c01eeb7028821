"""Will this merge work? Predicted from the weights alone, or better from rows without labels.

Every feature is 0 for equal models, and larger is worse. Signs are corrected for chance: unrelated models are near 1
whatever their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.valley.forecast.agreement import Agreement, compare_signs, sign_agreement
from sparing.valley.forecast.calibration import METRICS, SCORE, Fit, shipped_fit
from sparing.valley.forecast.soft_labels import RowGaps, gaps_of, measure_gaps
from sparing.valley.merging.compatible import Model, lora_pairs, vectors_of
from sparing.valley.merging.model_folders import require_same_function
from sparing.valley.scans.batch_norm import Batch
from sparing.vectors import Vector, axpy, dot, norm

Verdict = Literal["will merge", "uncertain", "will not"]

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

# Chance-corrected sign agreement below which two models share no origin: above the 0 of independent runs, below what
# runs from one initialization keep for long
UNRELATED_BELOW = 0.1

_LORA = (
    "{} LoRA pairs, such as {!r}: (A, B) and (−A, −B) are one model, so signs and means of factors say little; compare "
    "the merged weights."
)
FIRST = "This is from the weights alone, a first and cheap answer: rows, which need no labels, give a better one."

STRANGERS = (
    "Their signs agree as those of strangers do: models trained from different starts have their neurons in different "
    "orders, and an average mixes what does not belong together. Align them first: "
    "sparing.valley.align, or sparing merge --align activations."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeForecast:
    """What to expect of the average of two models."""

    gap: Mapping[str, float]
    """Predicted value of the average minus the mean of the two, by metric: loss (nat), error (share)."""
    interval: Mapping[str, tuple[float, float]]
    """Where nine in ten calibrated pairs of similar score lie, by metric."""
    verdict: Verdict
    """Whether the error's interval is below the tolerance, around it, or above it; and what overrides it."""
    reasons: tuple[str, ...]
    """Why, in sentences; the first decided."""
    features: Mapping[str, float]
    """What was measured on the weights: see ``FEATURES`` and ``TASK_FEATURES``."""
    agreement: Agreement
    """Sign agreement of all matrices, with that of every block."""
    score: float
    """The sum of features that ranks pairs, larger is worse."""
    pairs: int
    """Measured pairs behind the answer of the weights (count)."""
    rows: int = 0
    """Rows behind gap, interval and verdict (count); 0: they are from the weights alone."""


def predict_merge(
    a: Model,
    b: Model,
    *,
    base: Model | None = None,
    tolerance: float = 0.02,
    fit: Fit | None = None,
    rows: Iterable[Batch] | None = None,
    calibrate: Iterable[Batch] | None = None,
    model: nn.Module | None = None,
    labels: bool = True,
) -> MergeForecast:
    """Predict the gap of the average of two models with re-estimated batch-norm statistics.

    Without rows this is a first, cheap answer. The score is a sum of few features of the weights, with weights ≥ 0; the
    gap is a unimodal function of it, fitted to measured pairs of small networks: trust the ranking, and read the size
    with its interval, since the scale differs between tasks.

    With rows the average is run as well as the two. Labels are used where the rows have them: the second entry of a
    tuple, one class for each answer; ``labels`` of a mapping; the next tokens where a causal language model of
    transformers gets token ids alone. Without, the mean of the two models' probabilities takes their place, under which
    the gap of the average is an expectation; it misleads where models are surer than they are right. A few hundred rows
    do; 64 are too few.

    Args:
        a: A model or its state.
        b: Another of the same architecture.
        base: Their common ancestor, if known; then the features of the task vectors are reported too.
        tolerance: Largest gap in error (share) that still counts as a working merge.
        fit: Another calibration, from ``calibration.fit``; by default the shipped one.
        rows: Batches that neither model was trained on: inputs, shape (rows, ...), keyword arguments, or a tuple of
            inputs and labels, int64, below 0 where there is none.
        labels: Whether labels are looked at.
        calibrate: Batches of training inputs for the batch-norm statistics of all three; by default the rows.
        model: A live model of this architecture, if neither of the two is one.

    Returns:
        Gap, interval, verdict and reasons.

    Raises:
        UserError: If the models are of different architectures or settings or not finite, the tolerance is negative,
            or there are rows but no live model to run them.
    """
    why, do = "it is a share of wrong answers", "pass tolerance >= 0, such as 0.02"
    require(tolerance >= 0, "tolerance", tolerance, why, do)
    first, second = vectors_of(a, b)
    require_same_function([a, b, *([] if base is None else [base])])
    features = features_of(a, b, base)
    agreement = sign_agreement(matrices_of(first), matrices_of(second), by="block")
    fit = calibrated_fit(features, fit)
    found = forecast_of(features, agreement, tolerance=tolerance, fit=fit, lora=lora_pairs(first))
    if rows is None:
        return found
    return told_by_rows(found, measure_gaps(a, b, rows, calibrate=calibrate, model=model, labels=labels), tolerance)


def told_by_rows(found: MergeForecast, measured: RowGaps, tolerance: float) -> MergeForecast:
    """Put the answer of rows in the place of that of the weights."""
    rows, gaps = len(measured.values), gaps_of(measured.values, labelled=measured.labelled)
    low, high = gaps["error"].interval
    verdict: Verdict = "will not" if low > tolerance else "will merge" if high <= tolerance else "uncertain"
    span = f"between {low:+.3f} and {high:+.3f}" if math.isfinite(low) else "near"
    size = "" if math.isfinite(low) else f" {gaps['error'].value:+.3f}, by too few rows for an interval"
    by = f"By {rows} rows {'with' if measured.labelled else 'without'} labels"
    reasons = (
        f"{by} the gap in error is {span}{size}; {tolerance:g} is tolerated.",
        f"From the weights alone the answer was: {found.verdict}.",
        *(reason for reason in found.reasons if reason not in {FIRST, STRANGERS}),
    )
    return replace(
        found,
        gap={metric: one.value for metric, one in gaps.items()},
        interval={metric: one.interval for metric, one in gaps.items()},
        verdict=verdict,
        reasons=reasons,
        rows=rows,
    )


def forecast_of(
    features: Mapping[str, float], agreement: Agreement, *, tolerance: float, fit: Fit, lora: Sequence[str] = ()
) -> MergeForecast:
    """Forecast a merge from what was measured on the weights; ``lora`` names modules that are held as LoRA factors."""
    score = fit.score(features)
    interval = {metric: fit.interval(metric, score) for metric in METRICS}
    low, high = interval["error"]
    # Strangers' signs agree by chance; few votes leave a wide error around that
    unrelated = agreement.corrected < max(UNRELATED_BELOW, 3 * agreement.error)
    verdict: Verdict = (
        "will not" if unrelated or low > tolerance else "will merge" if high <= tolerance else "uncertain"
    )
    seen = (
        f"Signs of matrices agree in {agreement.element:.1%}, by chance in {agreement.chance:.1%}: "
        f"{agreement.corrected:.2f} after correction."
    )
    if lora:
        verdict, reasons = "uncertain", [_LORA.format(len(lora), lora[0]), seen]
    elif unrelated:
        reasons = [STRANGERS, seen]
    else:
        span = f"The gap in error is expected between {low:+.3f} and {high:+.3f}; {tolerance:g} is tolerated."
        worst = max(agreement.groups.items(), key=lambda item: -item[1].corrected if item[1].votes else -math.inf)
        reasons = [span, seen, f"They disagree most in {worst[0]!r} ({worst[1].corrected:.2f})."]
    return MergeForecast(
        gap={metric: fit.gap(metric, score) for metric in METRICS},
        interval=interval,
        verdict=verdict,
        reasons=(*reasons, *filter(None, [extrapolation_note(fit, score)]), FIRST),
        features=features,
        agreement=agreement,
        score=score,
        pairs=len(fit.scores),
    )


def calibrated_fit(features: Mapping[str, float], fit: Fit | None = None) -> Fit:
    """Return the given fit, if its features are there, or the shipped one."""
    if fit is not None:
        lacking = [name for name in fit.names if name not in features]
        require(not lacking, "fit", ", ".join(lacking), "it needs features that only a base gives", "pass base=...")
        return fit
    found = shipped_fit(SCORE)
    why, do = "it has too few pairs", "measure them: python -m benchmarks.valley.soups"
    require(found is not None, "calibration", "the shipped file", why, do)
    assert found is not None
    return found


def extrapolation_note(fit: Fit, score: float) -> str:
    """Say, in a sentence, where a score lies outside the calibrated ones; else nothing."""
    if score > fit.scores[-1]:
        return "They are farther apart than any calibrated pair: the gap is that of the farthest, and may be larger."
    return "" if score >= fit.scores[0] else "They are closer than any calibrated pair."


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
