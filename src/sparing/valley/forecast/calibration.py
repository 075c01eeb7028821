"""From features of two models to the gap of their average: measured pairs, and a monotone fit to them.

``calibration.json`` holds pairs of models whose average was evaluated. The fit is made from them when it is read, so no
coefficient can be out of step with its data:

1. a score, the sum of features with weights ≥ 0 that follows the ranks of the measured gaps in error best (least
   squares);
2. for each metric, the gap as a function of the score that falls first, if at all, and then rises (least squares).

It may fall first because the average of close models is mostly better than they are: in a convex valley the gap is
−⅛ dᵀ H d, d their difference. Then the barrier between valleys begins. Few numbers are fitted, so that the ranking
holds for unseen pairs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparing.errors import UserError, require

METRICS = ("loss", "error")  # whose gap is predicted: cross-entropy (nat) and share of wrong answers

# Features of the score. Those of task vectors rank pairs of another network worse, so they are reported only
# (``docs/results/valley.md``)
SCORE = ("disagreement", "layers", "distance")

LEVEL = 0.9  # share of pairs whose gap should lie in the interval

_FORMAT, _VERSION = "sparing.valley.calibration", 1
_FEWEST = 8  # pairs: with fewer the interval would be a guess
_FOLDS = 10
_SLOPE = 1e-3  # share of (range of gaps / range of scores), so that pairs are ranked where the fit is flat

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two models whose average was evaluated."""

    name: str  # for readers: network, data, origin, epoch, seed
    features: Mapping[str, float]  # from ``features_of``, with those of the base where there is one
    gap: Mapping[str, float]  # measured, by metric: value of the average minus the mean of the two


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A score and, for each metric, a unimodal function of it with its held-out residuals."""

    names: tuple[str, ...]  # features in the score
    weights: tuple[float, ...]  # of the features, ≥ 0
    scores: tuple[float, ...]  # scores of the pairs, rising
    # by metric, the fitted gap at each score: never rising up to some score, never falling from there
    fitted: Mapping[str, tuple[float, ...]]
    # by metric, measured less predicted gap of each pair, predicted by a fit without it and its neighbours
    residuals: Mapping[str, tuple[float, ...]]

    def score(self, features: Mapping[str, float]) -> float:
        """Return the score; NaN where a feature that counts is not defined."""
        return sum(weight * features[name] for name, weight in zip(self.names, self.weights, strict=True) if weight)

    def gap(self, metric: str, score: float) -> float:
        """Return the predicted gap at a score; flat beyond the calibrated range but for a slope that keeps ranks."""
        return _interpolate(np.asarray(self.scores), np.asarray(self.fitted[metric]), score)

    def interval(self, metric: str, score: float) -> tuple[float, float]:
        """Return the interval that holds the gap of ``LEVEL`` of such pairs, from residuals at nearby scores."""
        distances = np.abs(np.asarray(self.scores) - score)
        near = np.argsort(distances, kind="stable")[: max(2 * _FEWEST, len(self.scores) // 3)]
        errors = np.sort(np.asarray(self.residuals[metric])[near])
        # Conformal ranks: a new residual lies between the outer two of n exchangeable ones with chance (n−1)/(n+1)
        cut = max(0, math.floor((1 - LEVEL) / 2 * (len(errors) + 1)) - 1)
        middle = self.gap(metric, score)
        return middle + min(0.0, float(errors[cut])), middle + max(0.0, float(errors[-1 - cut]))


def fit(pairs: Sequence[Pair], names: Sequence[str]) -> Fit:
    """Fit the gap as a unimodal function of a weighted sum of features, with ten-fold cross-validated residuals."""
    usable = [
        pair
        for pair in pairs
        if all(math.isfinite(pair.features.get(name, math.nan)) for name in names)
        and all(math.isfinite(pair.gap.get(metric, math.nan)) for metric in METRICS)
    ]
    why = f"an interval needs {_FEWEST} of them at least"
    require(len(usable) >= _FEWEST, "calibration", f"{len(usable)} usable pairs", why, "measure more pairs")
    x = np.array([[pair.features[name] for name in names] for pair in usable])
    gaps = {metric: np.array([pair.gap[metric] for pair in usable]) for metric in METRICS}
    # One score for all metrics, from the error: it ranks pairs of any network, while losses depend on their scale
    weights = _nonnegative_weights(x, gaps["error"])
    left_out = {metric: np.empty(len(usable)) for metric in METRICS}
    # Neighbors in the file are checkpoints of one run: held out together, they show the error on another run
    for fold in np.array_split(np.arange(len(usable)), min(_FOLDS, len(usable))):
        rest = np.setdiff1d(np.arange(len(usable)), fold)
        part = _nonnegative_weights(x[rest], gaps["error"][rest])
        order = np.argsort(x[rest] @ part, kind="stable")
        for metric, gap in gaps.items():
            heights = unimodal_fit(gap[rest][order])
            for at in fold:
                left_out[metric][at] = gap[at] - _interpolate((x[rest] @ part)[order], heights, float(x[at] @ part))
    scores = x @ weights
    order = np.argsort(scores, kind="stable")
    return Fit(
        names=tuple(names),
        weights=tuple(map(float, weights)),
        scores=tuple(scores[order].tolist()),
        fitted={metric: tuple(unimodal_fit(gap[order]).tolist()) for metric, gap in gaps.items()},
        residuals={metric: tuple(left_out[metric][order].tolist()) for metric in METRICS},
    )


def unimodal_fit(values: Array) -> Array:
    """Return the closest sequence, in least squares, that never rises up to some index and never falls from there.

    Pools adjacent violators (Ayer et al. 1955) from both ends and splits where the total error is least.

    Example:
        >>> unimodal_fit(np.array([0.0, -2.0, -1.0, 3.0, 2.0])).tolist()
        [0.0, -2.0, -1.0, 2.5, 2.5]
    """
    falls, rises = _isotonic_prefixes(-values), _isotonic_prefixes(-values[::-1])
    errors = [falls[at].error + rises[len(values) - at].error for at in range(len(values) + 1)]
    at = int(np.argmin(errors))
    return np.concatenate([-falls[at].sequence(), -rises[len(values) - at].sequence()[::-1]])


class _IsotonicFit(NamedTuple):
    """The isotonic fit to a prefix of some values."""

    runs: tuple[tuple[float, int], ...]  # mean and length of each constant run
    error: float  # sum of squared residuals

    def sequence(self) -> Array:
        return np.repeat([mean for mean, _ in self.runs], [count for _, count in self.runs])


def _isotonic_prefixes(values: Array) -> list[_IsotonicFit]:
    """Fit a rising sequence to every prefix of some values, of length 0 to n."""
    runs: list[tuple[float, int]] = []
    squares, found = 0.0, [_IsotonicFit((), 0.0)]
    for value in values.tolist():
        mean, count = value, 1
        while runs and runs[-1][0] >= mean:
            before, number = runs.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        runs.append((mean, count))
        squares += value * value
        found.append(_IsotonicFit(tuple(runs), squares - sum(number * one * one for one, number in runs)))
    return found


def ranks(values: Array) -> Array:
    """Return ranks from 0 to 1; ties share the middle of theirs."""
    order = np.sort(values)
    middle = (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right") - 1) / 2
    return np.asarray(middle / max(1, len(values) - 1), dtype=np.float64)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN if either is constant."""
    first, second = (ranks(np.asarray(one, dtype=np.float64)) for one in (a, b))
    first, second = first - first.mean(), second - second.mean()
    size = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size else math.nan


def _interpolate(scores: Array, heights: Array, score: float) -> float:
    """Interpolate a fit between its scores; a small slope from its minimum on ranks scores on a plateau."""
    width = float(scores[-1] - scores[0])
    slope = _SLOPE * float(heights.max() - heights.min()) / width if width else 0.0
    return float(np.interp(score, scores, heights)) + slope * max(0.0, score - float(scores[int(heights.argmin())]))


def _nonnegative_weights(x: Array, gaps: Array) -> Array:
    """Fit weights ≥ 0 to the ranks of the gaps by least squares with an intercept.

    The best subset whose plain solution is positive is the non-negative solution: exact, and cheap for few features.
    """
    target = ranks(gaps)
    target, centred = target - target.mean(), x - x.mean(axis=0)
    best, least = np.eye(x.shape[1])[0], math.inf  # the first feature alone if nothing correlates
    for size in range(1, x.shape[1] + 1):
        for subset in itertools.combinations(range(x.shape[1]), size):
            columns = list(subset)
            found = np.linalg.lstsq(centred[:, columns], target, rcond=None)[0]
            error = float(np.sum((centred[:, columns] @ found - target) ** 2))
            if found.min() > 0 and error < least:
                best, least = np.zeros(x.shape[1]), error
                best[columns] = found
    return np.asarray(best, dtype=np.float64)


def read(path: str | PathLike[str] | None = None) -> list[Pair]:
    """Read measured pairs from a file of ``write``, by default the shipped one."""
    shipped = resources.files("sparing.valley") / "calibration.json"
    try:
        document: Any = json.loads((shipped if path is None else Path(path)).read_text("utf-8"))
        known = (document["format"], document["version"]) == (_FORMAT, _VERSION)
        pairs = []
        for one in document["pairs"]:
            features, gap = ({str(name): float(x) for name, x in one[part].items()} for part in ("features", "gap"))
            pairs.append(Pair(name=str(one["name"]), features=features, gap=gap))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        do = "measure it again: python -m benchmarks.valley.soups"
        raise UserError("calibration", got=path or shipped, why=f"it cannot be read ({error!r})", do=do) from error
    why = f"this version reads {_FORMAT} {_VERSION}"
    require(known, "calibration", path or shipped, why, "measure it again: python -m benchmarks.valley.soups")
    return pairs


def write(path: str | PathLike[str], pairs: Sequence[Pair], *, source: str) -> None:
    """Write measured pairs, nonfinite features left out; ``source`` names the command and commit that measured them."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "source": source,
        "pairs": [{"name": pair.name, "features": _finite(pair.features), "gap": _finite(pair.gap)} for pair in pairs],
    }
    Path(path).write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


@cache
def shipped_fit(names: tuple[str, ...]) -> Fit | None:
    """Return the fit to the shipped pairs, or None where too few of them have these features."""
    pairs = [pair for pair in read() if all(name in pair.features for name in names)]
    return fit(pairs, names) if len(pairs) >= _FEWEST else None


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items() if math.isfinite(value)}
