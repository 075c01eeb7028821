"""What the weights say about a merge before it is made, read from the disk tensor by tensor.

The numbers are those of ``sparing.valley.predict_merge``, which wants whole models in memory; a test holds the two
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor

from sparing.errors import require
from sparing.jobs.merge.settings import letter
from sparing.jobs.merge.sources import Derived, Source, changes
from sparing.report import format_number
from sparing.valley.forecast.agreement import Agreement, compare_signs
from sparing.valley.forecast.calibration import METRICS, SCORE
from sparing.valley.forecast.predict import (
    STRANGERS,
    Verdict,
    calibrated_fit,
    distance_features,
    extrapolation_note,
    forecast_of,
    task_features,
)
from sparing.valley.merging.compatible import require_averageable
from sparing.valley.merging.merge import is_weight

# Largest gap in error (share of answers) that still passes for a working merge, as in ``predict_merge``.
TOLERANCE: Final = 0.02

PIECE: Final = 1 << 16  # elements of a tensor that are summed in float64 at once (count)

SENTENCES: Final[Mapping[Verdict, str]] = {
    "will merge": "The weights say that they will merge.",
    "uncertain": "The weights alone cannot tell whether they will merge.",
    "will not": "The weights say that they will not merge.",
}


BY_ROWS: Final[Mapping[Verdict, str]] = {
    "will merge": "By what they answer they will merge.",
    "uncertain": "What they answer cannot tell whether they will merge.",
    "will not": "By what they answer they will not merge.",
}

# What a forecast without rows is.
FIRST: Final = "This is a first answer, from the weights alone; --data gives a better one."

# What to do about models that share no origin.
ALIGN: Final = (
    "They read as strangers, whose units are in different orders: --align activations, with --data, gives them one."
)


@dataclass(frozen=True, slots=True)
class MergeForecasts:
    """The forecasts of all pairs of models; of more than two models the worst pair decides."""

    pairs: list[dict[str, Any]]  # a row for each: features, gaps with their intervals, verdict
    signs: list[dict[str, Any]]  # a row for each block: how far the first two models agree

    def plain(self) -> dict[str, Any]:
        """What a checkpoint can hold."""
        return {"pairs": self.pairs, "signs": self.signs}

    @property
    def worst(self) -> dict[str, Any]:
        """The pair of the largest predicted gap; unrelated ones before all others."""
        order = list(SENTENCES)
        return max(self.pairs, key=lambda row: (order.index(row["verdict"]), row["gap_error"]))

    @property
    def fails(self) -> bool:
        """Whether a pair of them is predicted not to merge."""
        return self.worst["verdict"] == "will not"  # type: ignore[no-any-return]

    @property
    def sentence(self) -> str:
        """The verdict, its reason, and whether the calibration knows such a pair."""
        row = self.worst
        signs = f"signs agree in {100 * row['agreement']:.1f} %, strangers' in {100 * row['chance']:.1f} %"
        gap = format_number(row["gap_loss"], low=row["gap_loss_low"], high=row["gap_loss_high"])
        of = f" Of all pairs {row['pair']} is the worst." if len(self.pairs) > 1 else ""
        far = f" {row['beyond']}" if row.get("beyond") else ""
        if rows := row.get("rows"):
            start = BY_ROWS[row["verdict"]]
            told = f"By {rows} of the rows the expected gap of their mean is {gap} nats"
            weights = format_number(row["by_weights_loss"])
            return f"{start} {told}; from the weights alone it was {weights}. Their {signs}.{of}"
        start = f"{SENTENCES[row['verdict']]} Their {signs}; the expected gap of their mean is {gap} nats"
        offer = f" {ALIGN}" if row.get("strangers") else ""
        return f"{start}, as pairs of small image classifiers had it.{far}{of}{offer} {FIRST}"

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by table of a record."""
        row = self.worst
        summary = {"verdict": row["verdict"], "sentence": self.sentence, "pair": row["pair"]}
        return {"outlook": [summary], "forecast": self.pairs, "signs": self.signs}

    def predicted(self, metric: str) -> dict[str, float]:
        """The predicted gap of a metric, as columns beside the measured one."""
        return {f"predicted{end}": self.worst[f"gap_{metric}{end}"] for end in ("", "_low", "_high")}


def forecast_pairs(sources: Sequence[Source], base: Source | None) -> MergeForecasts:
    """Predict the gap of the mean of every pair of models; refuse what has no mean, and models equal to the bit."""
    checkpoints = [*sources, *([base] if base else [])]
    # Everything is read here, before hours of work: what is not finite, packed or an index that differs has no average
    for name in sources[0]:
        require_averageable(name, [one[name] for one in checkpoints], [one.label for one in checkpoints])
    pairs: list[dict[str, Any]] = []
    signs: list[dict[str, Any]] = []
    for (i, one), (j, other) in combinations(enumerate(sources), 2):
        features, agreement = measured(one, other, base)
        require(
            features["distance"] > 0, "models", f"{one.label} and {other.label}", "their weights are the same, bit by "
            "bit: there is nothing to merge", "name each model once",
        )  # fmt: skip
        pairs.append({"pair": f"{letter(i)}–{letter(j)}", **_row(features, agreement)})
        if not signs:
            signs = [
                {"block": block, "agreement": part.element, "chance": part.chance, "corrected": part.corrected}
                for block, part in sorted(agreement.groups.items(), key=lambda item: _natural(item[0]))
            ]
    return MergeForecasts(pairs, signs)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that puts layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _row(features: Mapping[str, float], agreement: Agreement) -> dict[str, Any]:
    """One pair of the table "forecast"."""
    known = all(math.isfinite(features.get(name, math.nan)) for name in SCORE)
    require(known, "calibration", "the shipped file", "it has too few pairs", "install sparing again")
    fit = calibrated_fit(features)
    found = forecast_of(features, agreement, tolerance=TOLERANCE, fit=fit)
    gaps: dict[str, float] = {}
    for metric in METRICS:
        low, high = found.interval[metric]
        gaps |= {f"gap_{metric}": found.gap[metric], f"gap_{metric}_low": low, f"gap_{metric}_high": high}
    return {
        "verdict": found.verdict,
        **gaps,
        "agreement": agreement.element,
        "chance": agreement.chance,
        "corrected": agreement.corrected,
        "strangers": found.reasons[0] == STRANGERS,
        "beyond": extrapolation_note(fit, found.score),
        **{name: features[name] for name in ("distance", "update", "cosine") if name in features},
    }


def parameters(source: Source) -> list[str]:
    """Names of the matrices of a checkpoint: floating, no running statistics; all parameters if none is a matrix."""
    names = [name for name, entry in source.entries.items() if is_weight(name, entry.floating)]
    return [name for name in names if len(source.entries[name].shape) > 1] or names


def measured(a: Source, b: Source, base: Source | None) -> tuple[dict[str, float], Agreement]:
    """Features of a pair, as ``features_of`` but read a tensor at a time, and the agreement of signs by block."""
    names = parameters(a)
    signs = compare_signs(Derived(tuple(names), a.__getitem__), b, by="tensor")
    sums = {name: _moments(a[name], b[name], base[name] if base else None) for name in names}
    total = {key: math.fsum(one[key] for one in sums.values()) for key in _KEYS}
    norms = {key: math.sqrt(total[key]) for key in _KEYS if key != "product"}
    features = distance_features(signs, (norms["a"], norms["b"]), norms["difference"], _shrinkage(list(sums.values())))
    if base is not None:
        tasks = compare_signs(changes(a, base, names), changes(b, base, names))
        changed = norms["change_a"], norms["change_b"]
        features |= task_features(tasks, changed, total["product"], norms["base"])
        product = changed[0] * changed[1]
        features["cosine"] = total["product"] / product if product else math.nan
    return features, compare_signs(Derived(tuple(names), a.__getitem__), b, by="block")


_KEYS: Final = ("a", "b", "difference", "base", "change_a", "change_b", "product")


def _moments(a: Tensor, b: Tensor, base: Tensor | None) -> dict[str, float]:
    """Sums of squares and products of one tensor, in float64, a piece at a time."""
    total = torch.zeros(len(_KEYS), dtype=torch.float64)
    pieces = [torch.split(tensor.flatten(), PIECE) for tensor in (a, b, a if base is None else base)]
    for x, y, z in (tuple(part.double() for part in parts) for parts in zip(*pieces, strict=True)):
        pairs = ((x, x), (y, y), (x - y, x - y), (z, z), (x - z, x - z), (y - z, y - z), (x - z, y - z))
        total += torch.stack([left @ right for left, right in pairs])
    return dict(zip(_KEYS, total.tolist(), strict=True))


def _shrinkage(sums: Sequence[Mapping[str, float]]) -> float:
    """Mean over tensors of 1 − ‖a + b‖ / (‖a‖ + ‖b‖), by ‖a + b‖² = 2‖a‖² + 2‖b‖² − ‖a − b‖²."""
    parts = [
        1 - math.sqrt(max(0.0, 2 * one["a"] + 2 * one["b"] - one["difference"]))
        / (math.sqrt(one["a"]) + math.sqrt(one["b"]))
        for one in sums
        if one["a"]
    ]  # fmt: skip
    return sum(parts) / len(parts) if parts else math.nan
