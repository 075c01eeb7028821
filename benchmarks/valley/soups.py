"""Averages of two halves: how much worse they are than their members, and what was predicted of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

import sparing.valley
from benchmarks.valley.cases import HYPER, LONG, SEEDS, VGG, Case, rows_of
from benchmarks.valley.pairs import CALIBRATE, EPOCHS, REPORT, STARTS, base_of, half_of
from benchmarks.valley.store import Store
from sparing.blocks import named_parameters
from sparing.valley.forecast.agreement import sign_agreement
from sparing.valley.forecast.calibration import METRICS, SCORE, Fit, Pair, fit, write
from sparing.valley.forecast.predict import features_of
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.interpolate import interpolate
from sparing.vectors import Vector

SHIPPED = Path(sparing.valley.__file__).parent / "calibration.json"
"""Pairs that predictions are made from."""
TASK = ("update", "task_disagreement")
"""Features of the task vectors, tried in the score."""
FEW = (0, 1, 2)
"""Seeds of the calibration; strangers take their second half from the next."""
LINE = tuple(step / 4 for step in range(-4, 9))
"""Positions on the line through a net trained with small batches (0) and one with large batches (1)."""


def soups() -> None:
    """Every pair's gap, with the signs the two share."""
    store = Store("soups")
    for case in (*REPORT, *CALIBRATE):
        for start in STARTS:
            for seed in SEEDS if case in REPORT else FEW[: 2 if start == "strangers" else 3]:
                for epoch in EPOCHS:
                    key = f"{case.name} {seed} {start} {epoch}"
                    store.once(key, lambda at=(case, seed, start, epoch): _pair(*at))


def _pair(case: Case, seed: int, start: str, epoch: int) -> dict[str, Any]:
    rows = rows_of(case.data)
    base, (a, b) = base_of(case, seed, start), (half_of(case, seed, start, half, epoch) for half in (0, 1))
    line = interpolate(a, b, Classification(*rows.test), lambdas=(0.5,), calibrate=rows.calibration)
    signs = [sign_agreement(*two, zero="minus").element for two in ((base, a), (base, b), (a, b))]
    return {
        "case": case.name, "seed": seed, "start": start, "epoch": epoch,
        "role": "report" if case in REPORT else "calibrate",
        "ends": [line.at("error", 0.0), line.at("error", 1.0)], "middle": line.at("error", 0.5),
        "gap": line.gap["error"], "gap_loss": line.gap["loss"],
        "ssr_ia": signs[0], "ssr_ib": signs[1], "ssr_ab": signs[2],
    }  # fmt: skip


def line() -> None:
    """From small to large batches: the curve, and mean, deviation and signs of every kind of parameter."""
    store = Store("line")
    small, large = (next(case for case in HYPER if case.label == label) for label in ("batch_16", "batch_512"))
    for seed, end in itertools.product(SEEDS, (large, LONG)):
        key = f"{VGG.name} {seed}" + (" long" if end is LONG else "")
        store.once(key, lambda at=seed, end=end: _line(small, end, at))


def _line(small: Case, large: Case, seed: int) -> dict[str, Any]:
    rows, a, b = rows_of(small.data), small.trained(seed), large.trained(seed)
    found = interpolate(a, b, Classification(*rows.test), lambdas=LINE, calibrate=rows.calibration)
    first, second = ({n: p.detach() for n, p in named_parameters(each).items()} for each in (a, b))
    kinds = {kind: [name for name in first if _kind(name) == kind] for kind in dict.fromkeys(map(_kind, first))}
    table = {kind: _compare(first, second, names) for kind, names in kinds.items()}
    curve = {metric: list(found.values[metric]) for metric in ("error", "loss")}
    trained = Classification(rows.inputs, rows.targets)
    losses = [trained(each)["loss"] for each in (a, b)]
    return {
        "seed": seed, "large": large.label, "losses": losses, "lambdas": list(found.lambdas), **curve, "kinds": table,
    }  # fmt: skip


def _kind(name: str) -> str:
    layer, _, leaf = name.rpartition(".")
    where = "classifier" if layer == "head" else "norm" if layer.endswith("norm") else "other"
    return f"{where} {leaf}"


def _compare(a: Vector, b: Vector, names: list[str]) -> dict[str, float]:
    """Mean and deviation of both, and the shares of a and of b that have the sign of b − a."""
    one, two = (torch.cat([vector[name].flatten() for name in names]) for vector in (a, b))
    step = two - one
    share = [float(((end > 0) == (step > 0)).float().mean()) for end in (one, two)]
    return {
        "mean_small": float(one.mean()), "mean_large": float(two.mean()),
        "std_small": float(one.std()), "std_large": float(two.std()),
        "agree_small": share[0], "agree_large": share[1],
    }  # fmt: skip


def forecast() -> None:
    """Features of every measured pair, which ship as the calibration; what one net's pairs predict of the other's."""
    measured, store = Store("soups").rows, Store("forecast")
    for key, row in measured.items():
        store.once(key, lambda row=row: _features(row))
    pairs = {
        key: Pair(name=key, features=finite_of(store.rows[key]), gap={"error": row["gap"], "loss": row["gap_loss"]})
        for key, row in measured.items()
    }
    known = [pair for key, pair in pairs.items() if measured[key]["role"] == "calibrate"]
    write(SHIPPED, list(pairs.values()), source=Store("soups").command)
    predictions = Store("predictions", anew=True)
    for names, label in ((SCORE, "weights"), ((*SCORE, *TASK), "with base")):
        predictions.once(label, lambda names=names: _predicted(fit(known, names), pairs, measured, names))


def _features(row: dict[str, Any]) -> dict[str, float]:
    case = next(case for case in (*REPORT, *CALIBRATE) if case.name == row["case"])
    seed, start, epoch = row["seed"], row["start"], row["epoch"]
    a, b = (half_of(case, seed, start, half, epoch) for half in (0, 1))
    return features_of(a, b, None if start == "strangers" else base_of(case, seed, start))


def finite_of(features: dict[str, Any]) -> dict[str, float]:
    """Without what is not defined."""
    return {name: value for name, value in features.items() if value is not None}


def _predicted(fitted: Fit, pairs: dict[str, Pair], measured: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Predicted and measured gaps of the pairs that are reported and have these features."""
    keys = [
        key for key, pair in pairs.items()
        if measured[key]["role"] == "report" and all(name in pair.features for name in names)
    ]  # fmt: skip
    scores = {key: fitted.score(pairs[key].features) for key in keys}
    return {
        "features": dict(zip(fitted.names, fitted.weights, strict=True)), "calibrated": len(fitted.scores),
        "pairs": [
            {
                "key": key, "start": measured[key]["start"], "score": scores[key],
                **{f"{metric} predicted": fitted.gap(metric, scores[key]) for metric in METRICS},
                **{f"{metric} low": fitted.interval(metric, scores[key])[0] for metric in METRICS},
                **{f"{metric} high": fitted.interval(metric, scores[key])[1] for metric in METRICS},
                **{f"{metric} measured": pairs[key].gap[metric] for metric in METRICS},
            }
            for key in keys
        ],
    }  # fmt: skip


if __name__ == "__main__":
    soups()
    forecast()
