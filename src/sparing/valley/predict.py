"""Will this merge work? Predicted from the weights alone, before anything is evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sparing.errors import require
from sparing.valley.agreement import Agreement, sign_agreement
from sparing.valley.calibration import METRICS, SCORE, Fit, shipped_fit
from sparing.valley.companions import require_same_function
from sparing.valley.compatible import Model, lora_pairs, vectors_of
from sparing.valley.features import features_of, matrices_of
from sparing.vectors import Vector

Verdict = Literal["will merge", "uncertain", "will not"]

# Chance-corrected sign agreement below which two models share no origin: above the 0 of independent runs, below what
# runs from one initialization keep for long
STRANGERS = 0.1


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
    """Measured pairs behind the forecast (count)."""


def predict_merge(
    a: Model, b: Model, *, base: Model | None = None, tolerance: float = 0.02, fit: Fit | None = None
) -> MergeForecast:
    """Predict the gap of the average of two models with re-estimated batch-norm statistics.

    The score is a sum of few features with weights ≥ 0; the gap is a unimodal function of it, fitted to measured pairs
    of small networks. Take the ranking seriously and the size with its interval: another task has another scale.

    Args:
        a: A model or its state.
        b: Another of the same architecture.
        base: Their common ancestor, if known; then the features of the task vectors are reported too.
        tolerance: Largest gap in error (share) that still counts as a working merge.
        fit: Another calibration, from ``calibration.fit``; by default the shipped one.

    Returns:
        Gap, interval, verdict and reasons.

    Raises:
        UserError: If the models are of different architectures or settings or not finite, or the tolerance is negative.
    """
    why, do = "it is a share of wrong answers", "pass tolerance >= 0, such as 0.02"
    require(tolerance >= 0, "tolerance", tolerance, why, do)
    first, second = vectors_of(a, b)
    require_same_function([a, b, *([] if base is None else [base])])
    features = features_of(a, b, base)
    chosen = _calibrated_fit(features, fit)
    score = chosen.score(features)
    agreement = sign_agreement(matrices_of(first), matrices_of(second), by="block")
    gap = {metric: chosen.gap(metric, score) for metric in METRICS}
    interval = {metric: chosen.interval(metric, score) for metric in METRICS}
    verdict, reasons = _verdict(first, agreement, interval["error"], tolerance)
    return MergeForecast(
        gap=gap,
        interval=interval,
        verdict=verdict,
        reasons=(*reasons, *filter(None, [extrapolation_note(chosen, score)])),
        features=features,
        agreement=agreement,
        score=score,
        pairs=len(chosen.scores),
    )


def _calibrated_fit(features: Mapping[str, float], fit: Fit | None) -> Fit:
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


def _verdict(
    vector: Vector, agreement: Agreement, error: tuple[float, float], tolerance: float
) -> tuple[Verdict, list[str]]:
    """The verdict and its reasons."""
    seen = (
        f"Signs of matrices agree in {agreement.element:.1%}, by chance in {agreement.chance:.1%}: "
        f"{agreement.corrected:.2f} after correction."
    )
    if pairs := lora_pairs(vector):
        return "uncertain", [
            f"{len(pairs)} LoRA pairs, such as {pairs[0]!r}: (A, B) and (−A, −B) are one model, so signs and means of "
            "factors say little; compare the merged weights.",
            seen,
        ]
    verdict = verdict_of(agreement, error, tolerance)
    if unrelated(agreement):
        return verdict, [
            "Their signs agree as those of strangers do: models trained from different starts have their neurons in "
            "different orders, and an average mixes what does not belong together. Align them first.",
            seen,
        ]
    low, high = error
    span = f"The gap in error is expected between {low:+.3f} and {high:+.3f}; {tolerance:g} is tolerated."
    worst = max(agreement.groups.items(), key=lambda item: -item[1].corrected if item[1].votes else -math.inf)
    return verdict, [span, seen, f"They disagree most in {worst[0]!r} ({worst[1].corrected:.2f})."]


def unrelated(agreement: Agreement) -> bool:
    """Whether the signs of two models agree no more than those of models from different starts."""
    return agreement.corrected < max(STRANGERS, 3 * agreement.error)


def verdict_of(agreement: Agreement, error: tuple[float, float], tolerance: float) -> Verdict:
    """Return what the agreement of the matrices' signs and the interval of the gap in error (share) say."""
    low, high = error
    if unrelated(agreement) or low > tolerance:
        return "will not"
    return "will merge" if high <= tolerance else "uncertain"


def extrapolation_note(fit: Fit, score: float) -> str:
    """Say, in a sentence, where a score lies outside the calibrated ones; else nothing."""
    if score > fit.scores[-1]:
        return "They are farther apart than any calibrated pair: the gap is that of the farthest, and may be larger."
    return "" if score >= fit.scores[0] else "They are closer than any calibrated pair."
