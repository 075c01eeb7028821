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
from sparing.jobs.scan.checkpoints import Inputs
from sparing.jobs.scan.curves import CurveSpec
from sparing.jobs.scan.settings import Settings, Statistics
from sparing.report import Record
from sparing.valley.apply import perturbing
from sparing.valley.better import Better, ByMetric, better_by_metric, declared_better
from sparing.valley.config import Noise
from sparing.valley.evaluators import run_evaluate as numbers_at
from sparing.valley.scan import scan
from sparing.valley.statistics import Refresher
from sparing.vectors import Vector

BINS: Final = 24  # bars of the histogram (count)

NORMS: Final = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def try_(inputs: Inputs, settings: Settings) -> None:
    """Walk two steps, so that a measure that cannot be trusted is rejected before anything is written."""
    options = {"calibrate": inputs.calibrate, "statistics": settings.statistics, "seed": settings.seed}
    found = scan(inputs.model, inputs.evaluate, Noise("gaussian"), points=3, draws=1, widths=(0.1,), **options)  # type: ignore[arg-type]
    # Asking for the index raises if the direction of the metric is unknown.
    found.asymmetry[_leading(inputs, found.values)]


def measure_(record: Record, spec: CurveSpec, inputs: Inputs, settings: Settings, initial: Vector | None) -> None:
    """Walk along one direction: a row of "curves" per width, a row of "values" per draw and λ."""
    began = time.perf_counter()
    found = scan(
        inputs.model, inputs.evaluate, spec.direction(settings, initial), calibrate=inputs.calibrate,
        statistics=settings.statistics, points=settings.points, widths=settings.widths,
        draws=1 if spec.special else settings.draws, seed=settings.seed, workers=settings.workers,
    )  # fmt: skip
    seconds = (time.perf_counter() - began) / len(found.curves)
    for curve in found.curves:
        number = len(record.table("curves"))
        columns = {"curve": number, "kind": spec.kind, "sign": spec.sign, "ratio": spec.ratio, "group": spec.group}
        record.add("curves", **columns, **numbers(curve), seconds=seconds)
        for draw in range(len(curve.consistency)):
            for at, step in enumerate(curve.lambdas):
                measured = {name: float(values[draw, at]) for name, values in curve.values.items()}
                record.add("values", curve=number, draw=draw, step=float(step), **measured)


def numbers(curve: Any) -> dict[str, float | int | None]:
    """Columns of a curve: width, draws, sign consistency, and the indices of metrics whose direction is known."""
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


def ways_of(inputs: Inputs, metrics: Iterable[str]) -> ByMetric[Better]:
    """Which way each metric gets better, as far as it is known."""
    return better_by_metric(metrics, declared_better(inputs.evaluate, None))


def _leading(inputs: Inputs, metrics: Iterable[str]) -> str:
    """The metric that the page draws first: the subject's own, error, loss, or the first of a known direction."""
    names = list(metrics)
    known = list(ways_of(inputs, names))
    return next((name for name in (inputs.metric, "error", "loss", *known) if name in names), names[0])


def describe_(record: Record, inputs: Inputs, statistics: Statistics = "exact") -> None:
    """Add the row of "model", with every metric at λ = 0 under the same batch-norm statistics as on every curve."""
    with perturbing(inputs.model):
        inputs.model.eval()
        with Refresher(inputs.model, inputs.calibrate, statistics).at_point():
            at_zero = numbers_at(inputs.evaluate, inputs.model)
    names, ways = list(at_zero), ways_of(inputs, at_zero)
    here = {f"at_{name}": value for name, value in at_zero.items()}
    here_better = {f"better_{name}": ways.get(name, "unknown") for name in names}
    count = sum(parameter.numel() for parameter in named_parameters(inputs.model).values())
    record.add(
        "model", name=inputs.name, parameters=count, source=inputs.source, metrics=" ".join(names),
        metric=_leading(inputs, names), rows=getattr(inputs.evaluate, "rows", None),
        relu=any(isinstance(module, nn.ReLU) for module in inputs.model.modules()),
        refreshed=inputs.calibrate is not None, **here, **here_better,
    )  # fmt: skip


def scales(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, kind of layer and weight of every norm layer."""
    for name, module in model.named_modules():
        rms = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
        weight = getattr(module, "weight", None)
        if (isinstance(module, NORMS) or rms) and isinstance(weight, torch.Tensor):
            yield name, type(module).__name__, weight.detach().flatten()


def histogram_(record: Record, model: nn.Module) -> None:
    """Histogram the scales of norm layers: rows of "scales" (a bar each) and "layers" (a layer each)."""
    found = list(scales(model))
    if not found:
        return
    for name, kind, weight in found:
        share = float((weight > 0).float().mean())
        record.add("layers", layer=name, kind=kind, mean=float(weight.mean()), positive=share, count=len(weight))
    every = torch.cat([weight.float() for _, _, weight in found]).double().numpy()
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1e-6, BINS + 1)
    # An edge at zero, so that no bar mixes signs.
    edges = np.sort(np.append(edges, 0.0)) if low < 0 < high else edges
    counts, _ = np.histogram(every, edges)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        record.add("scales", left=float(left), right=float(right), count=int(count))
