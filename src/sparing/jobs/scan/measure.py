"""One curve as rows of a record: its index, branches and half-widths by metric, and every measured value."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.jobs.scan.asks import Ask
from sparing.jobs.scan.checkpoints import Subject
from sparing.jobs.scan.settings import Settings, Statistics
from sparing.report import Record
from sparing.valley.apply import perturbing
from sparing.valley.better import Better, ByMetric, better_by_metric, declared_better
from sparing.valley.config import Noise
from sparing.valley.evaluators import run_evaluate as numbers_at
from sparing.valley.scan import scan
from sparing.valley.statistics import Refresher
from sparing.vectors import Vector

BINS: Final = 24
"""Bars of the histogram (count)."""

NORMS: Final = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def try_(subject: Subject, settings: Settings) -> None:
    """Walk two steps, so that a measure that cannot be trusted is told before anything is written.

    Args:
        subject: Model and measure.
        settings: For the statistics.

    Raises:
        UserError: If the measure is not deterministic, changes the model or is not finite, calibration is missing, or
            nobody says which way the metric of the page gets better.
    """
    told = {"calibrate": subject.calibrate, "statistics": settings.statistics, "seed": settings.seed}
    found = scan(subject.model, subject.evaluate, Noise("gaussian"), points=3, draws=1, widths=(0.1,), **told)  # type: ignore[arg-type]
    found.asymmetry[_leading(subject, found.values)]


def measure_(record: Record, ask: Ask, subject: Subject, settings: Settings, initial: Vector | None) -> None:
    """Walk along one direction.

    Args:
        record: Receives a row of "curves" for every width, and a row of "values" for every draw and λ.
        ask: Which direction.
        subject: Model and measure.
        settings: Points, draws, widths, statistics, seed.
        initial: Weights before training, if known.
    """
    began = time.perf_counter()
    found = scan(
        subject.model, subject.evaluate, ask.direction(settings, initial), calibrate=subject.calibrate,
        statistics=settings.statistics, points=settings.points, widths=settings.widths,
        draws=1 if ask.special else settings.draws, seed=settings.seed, workers=settings.workers,
    )  # fmt: skip
    seconds = (time.perf_counter() - began) / len(found.curves)
    for curve in found.curves:
        number = len(record.table("curves"))
        told = {"curve": number, "kind": ask.kind, "sign": ask.sign, "ratio": ask.ratio, "group": ask.group}
        record.add("curves", **told, **numbers(curve), seconds=seconds)
        for draw in range(len(curve.consistency)):
            for at, step in enumerate(curve.lambdas):
                measured = {name: float(values[draw, at]) for name, values in curve.values.items()}
                record.add("values", curve=number, draw=draw, step=float(step), **measured)


def numbers(curve: Any) -> dict[str, float | int | None]:
    """What a curve comes with.

    Args:
        curve: A ``sparing.valley.Curve``.

    Returns:
        Width, draws, sign consistency (mean over draws), and for each metric of which it is known which way it gets
        better the asymmetry index with its interval (None below the noise, or of a single draw), whether λ = 0 is a
        minimum, and how much worse both sides are in the mean.
    """
    row: dict[str, float | int | None] = {
        "width": float(curve.width), "n": len(curve.consistency), "consistency": float(np.mean(curve.consistency)),
    }  # fmt: skip
    for metric, index in curve.asymmetry.items():
        for end, value in zip(("", "_low", "_high"), (index.value, *index.interval), strict=True):
            row[f"asymmetry_{metric}{end}"] = value if math.isfinite(value) else None
        row[f"minimum_{metric}"] = index.minimum
        row[f"plus_{metric}"] = curve.branches[metric].rise_plus
        row[f"minus_{metric}"] = curve.branches[metric].rise_minus
    return row


def ways_of(subject: Subject, metrics: Iterable[str]) -> ByMetric[Better]:
    """Which way each metric gets better, as far as it is known."""
    return better_by_metric(metrics, declared_better(subject.evaluate, None))


def _leading(subject: Subject, metrics: Iterable[str]) -> str:
    """The metric that the page draws first: the subject's own, error, loss, or the first of a known direction."""
    names = list(metrics)
    known = list(ways_of(subject, names))
    return next((name for name in (subject.metric, "error", "loss", *known) if name in names), names[0])


def describe_(record: Record, subject: Subject, statistics: Statistics = "exact") -> None:
    """Note what is scanned.

    Args:
        record: Receives the row of "model", with every metric at λ = 0 and which way it gets better.
        subject: Model and measure.
        statistics: Of batch norms; at λ = 0 they are what they are on every curve.
    """
    with perturbing(subject.model):
        subject.model.eval()
        with Refresher(subject.model, subject.calibrate, statistics).at_point():
            at_zero = numbers_at(subject.evaluate, subject.model)
    names, ways = list(at_zero), ways_of(subject, at_zero)
    here = {f"at_{name}": value for name, value in at_zero.items()}
    here_better = {f"better_{name}": ways.get(name, "unknown") for name in names}
    count = sum(parameter.numel() for parameter in named_parameters(subject.model).values())
    record.add(
        "model", name=subject.name, parameters=count, source=subject.source, metrics=" ".join(names),
        metric=_leading(subject, names), rows=getattr(subject.evaluate, "rows", None),
        relu=any(isinstance(module, nn.ReLU) for module in subject.model.modules()),
        refreshed=subject.calibrate is not None, **here, **here_better,
    )  # fmt: skip


def scales(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Scales of the norm layers.

    Args:
        model: Any.

    Yields:
        Name, kind of the layer, weight.
    """
    for name, module in model.named_modules():
        rms = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
        weight = getattr(module, "weight", None)
        if (isinstance(module, NORMS) or rms) and isinstance(weight, torch.Tensor):
            yield name, type(module).__name__, weight.detach().flatten()


def histogram_(record: Record, model: nn.Module) -> None:
    """Count the scales of norm layers by size.

    Args:
        record: Receives rows of "scales" (a bar each) and "layers" (a layer each); none where there is no norm layer.
        model: Any.
    """
    found = list(scales(model))
    if not found:
        return
    for name, kind, weight in found:
        share = float((weight > 0).float().mean())
        record.add("layers", layer=name, kind=kind, mean=float(weight.mean()), positive=share, count=len(weight))
    every = torch.cat([weight.float() for _, _, weight in found]).double().numpy()
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1e-6, BINS + 1)
    edges = np.sort(np.append(edges, 0.0)) if low < 0 < high else edges
    counts, _ = np.histogram(every, edges)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        record.add("scales", left=float(left), right=float(right), count=int(count))
