"""What a scan measures beside curves: lines and planes between models, a surface, curvature, sharpness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.errors import require
from sparing.jobs.scan.inputs import Inputs
from sparing.jobs.scan.settings import Settings
from sparing.report import Record
from sparing.valley.directions.config import Noise
from sparing.valley.merging.compatible import require_compatible, state_of
from sparing.valley.scans.batch_norm import batch_norms
from sparing.valley.scans.curvature import Mode, gradient, hessian_trace, top_eigenpairs
from sparing.valley.scans.interpolate import interpolate
from sparing.valley.scans.plane import plane
from sparing.valley.scans.sharpness import sharpness
from sparing.valley.scans.surface import scan2d
from sparing.vectors import norm

TOLERANCE = 1e-3  # relative accuracy of eigenvalues


def check_shapes(inputs: Inputs, others: Sequence[nn.Module], settings: Settings) -> None:
    """Refuse, before anything is written, other architectures and a measure that cannot be differentiated."""
    names = ["MODEL", *map(str, (*settings.towards, *settings.trajectory))]
    require_compatible([state_of(one) for one in (inputs.model, *others)], names)
    for part in {"curvature", "sharpness"} & set(settings.parts):
        holds = all(callable(getattr(inputs.evaluate, name, None)) for name in ("loss_of", "batches"))
        do = "use Classification or NextToken, or give evaluate.loss_of(model, batch) and evaluate.batches(rows)"
        require(holds, "parts", part, "this measure has no loss to differentiate", do)


def shapes_of(
    record: Record, inputs: Inputs, others: Sequence[nn.Module], settings: Settings
) -> dict[str, Callable[[], None]]:
    """What the settings want, by the name that the progress bar shows, in order."""
    wanted: dict[str, Callable[[], None]] = {}
    towards, path = list(others[: len(settings.towards)]), list(others[len(settings.towards) :])
    for at, (name, other) in enumerate(zip(_names(settings.towards), towards, strict=True), start=1):
        wanted[f"line {at} to {name}"] = partial(line_, record, name, other, inputs, settings)
    if len(towards) == 2:
        wanted["plane"] = partial(plane_, record, towards, path, inputs, settings)
    for part, work in (("surface", surface_), ("curvature", curvature_), ("sharpness", sharpness_)):
        if part in settings.parts:
            wanted[part] = partial(work, record, inputs, settings)
    return wanted


def _names(paths: Sequence[Path]) -> list[str]:
    """Last parts of paths, or whole paths where these are the same."""
    short = [path.stem if path.suffix == ".safetensors" else path.name for path in paths]
    return short if len(set(short)) == len(short) else list(map(str, paths))


def line_(record: Record, name: str, other: nn.Module, inputs: Inputs, settings: Settings) -> None:
    """Walk from the model to another: rows of "line", and one of "lines" with gap and barrier."""
    found = interpolate(
        inputs.model, other, inputs.evaluate, lambdas=torch.linspace(0, 1, settings.points).tolist(),
        calibrate=inputs.calibrate, statistics=settings.statistics,
    )  # fmt: skip
    for row in found.rows_of():
        position = row.pop("lambda")
        record.add("line", towards=name, position=position, **row)
    told = {f"{what}_{metric}": value for what in ("gap", "barrier") for metric, value in getattr(found, what).items()}
    record.add("lines", towards=name, agreement=found.agreement.element, chance=found.agreement.chance, **told)


def plane_(
    record: Record, others: Sequence[nn.Module], path: Sequence[nn.Module], inputs: Inputs, settings: Settings
) -> None:
    """Measure the plane through three models: rows of "plane", and of "places" for models and checkpoints."""
    first, second = _names(settings.towards)
    found = plane(
        inputs.model, others[0], others[1], inputs.evaluate, path=path, points=settings.points,
        calibrate=inputs.calibrate, statistics=settings.statistics, workers=settings.workers,
    )  # fmt: skip
    for row in found.rows_of():
        record.add("plane", **row)
    for at, name in enumerate((inputs.name, first, second)):
        here = {metric: float(values[at]) for metric, values in found.at_corners.items()}
        x, y = found.corners[at]
        record.add("places", name=name, kind="model", x=float(x), y=float(y), off=0.0, **here)
    for name, (x, y), off in zip(_names(settings.trajectory), found.path, found.off, strict=True):
        record.add("places", name=name, kind="checkpoint", x=float(x), y=float(y), off=float(off))


def surface_(record: Record, inputs: Inputs, settings: Settings) -> None:
    """Measure the plane of two draws of Gaussian noise: rows of "surface"."""
    noise = Noise("gaussian", norm=settings.norm)
    found = scan2d(
        inputs.model, inputs.evaluate, noise, noise, calibrate=inputs.calibrate, statistics=settings.statistics,
        points=settings.points, width=settings.distances[0], seed=settings.seed, workers=settings.workers,
    )  # fmt: skip
    for row in found.rows_of():
        values = {metric: row[metric] for metric in found.values}
        record.add("surface", x=row["lambda_first"], y=row["lambda_second"], **values)


def curvature_(record: Record, inputs: Inputs, settings: Settings) -> None:
    """Compute slope, trace and eigenvalues of the Hessian: rows of "curvature"."""
    measure: Any = inputs.evaluate
    mode, data = _mode(inputs, settings), measure.batches(settings.curvature_rows)
    slope = float(norm(gradient(inputs.model, measure.loss_of, data, mode=mode)))
    record.add("curvature", quantity="norm of the gradient", value=slope)
    trace = hessian_trace(inputs.model, measure.loss_of, data, seed=settings.seed, mode=mode)
    low, high = trace.interval
    record.add("curvature", quantity="trace", value=trace.value, value_low=low, value_high=high)
    size = sum(one.numel() for one in inputs.model.parameters() if one.requires_grad)
    count = min(settings.eigenvalues, size - 1)
    same: dict[str, Any] = {"seed": settings.seed, "tolerance": TOLERANCE, "mode": mode}
    for at, (value, _) in enumerate(top_eigenpairs(inputs.model, measure.loss_of, data, count, **same), start=1):
        record.add("curvature", quantity=f"eigenvalue {at}", value=value)
    # The largest eigenvalue of the negative loss is the smallest, with a minus
    ((lowest, _),) = top_eigenpairs(inputs.model, lambda net, batch: -measure.loss_of(net, batch), data, 1, **same)
    record.add("curvature", quantity="smallest eigenvalue", value=-lowest)


def sharpness_(record: Record, inputs: Inputs, settings: Settings) -> None:
    """Search the highest rise within a ball, plain and adaptive: rows of "sharpness"."""
    measure: Any = inputs.evaluate
    mode, data = _mode(inputs, settings), measure.batches(settings.curvature_rows)
    for adaptive, radius in ((False, settings.radius), (True, settings.adaptive_radius)):
        found = sharpness(
            inputs.model, measure.loss_of, data, radius=radius, adaptive=adaptive, seed=settings.seed, mode=mode
        )
        record.add(
            "sharpness", ball="adaptive" if adaptive else "plain", radius=radius, first_step=found.first,
            rise=found.value, slope=found.slope, loss_here=found.loss,
        )  # fmt: skip


def _mode(inputs: Inputs, settings: Settings) -> Mode:
    """Batch norm follows the weights, as on every curve, unless it is asked not to."""
    return "batch" if batch_norms(inputs.model) and settings.statistics != "stale" else "eval"
