"""The curves of a scan, each once, in the order in which they are walked; each becomes rows of a record."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.jobs.scan.inputs import Inputs
from sparing.jobs.scan.settings import GroupName, NoiseName, Settings, Statistics
from sparing.report import Record
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import Noise, Special, SpecialKind
from sparing.valley.directions.selection import selected
from sparing.valley.scans.batch_norm import Refresher
from sparing.valley.scans.better import Better, ByMetric, better_by_metric, declared_better
from sparing.valley.scans.curve import RISES
from sparing.valley.scans.evaluators import run_evaluate as numbers_at
from sparing.valley.scans.scan import scan
from sparing.vectors import Vector

# Directions as the paper writes them; μ is the mean of each tensor.
TITLES: Final[dict[str, str]] = {
    "gaussian": "G(0, 1)", "uniform": "U(−1, 1)", "ternary": "{−1, 0, 1}", "shifted-gaussian": "G(1, 1)",
    "positive-uniform": "U(0, 1)", "binary": "{0, 1}", "one": "{1}",
    "initial": "θ₀, the start", "self": "θ, the weights", "sign": "sign(θ)", "centred-sign": "sign(θ − μ)",
    "positive": "1 where θ > 0", "centred-positive": "1 where θ > μ",
}  # fmt: skip

SPECIALS: Final[tuple[SpecialKind, ...]] = (
    "initial", "self", "sign", "centred-sign", "positive", "centred-positive",
)  # fmt: skip

GROUPS: Final[dict[str, str]] = {
    "all": "all", "classifier": "classifier (CLF)", "features": "all but the classifier (FEAT)",
    "first": "first blocks (FIRST)", "conv": "convolutions (CONV)", "norm": "norm layers (NORM)",
}  # fmt: skip

BINS: Final = 24  # bars of the histogram (count)

NORMS: Final = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """One curve: what to walk along."""

    kind: NoiseName | SpecialKind  # noise or special direction
    ratio: float = 0.0  # sign-change ratio: 0 is raw, 1 is sign-consistent
    group: GroupName = "all"  # parameters that move

    @property
    def special(self) -> bool:
        """Whether it is deterministic."""
        return self.kind in SPECIALS

    @property
    def sign(self) -> str:
        """Its signs in a word."""
        return {0.0: "raw", 1.0: "consistent"}.get(self.ratio, f"{self.ratio:g}")

    def direction(self, settings: Settings, initial: Vector | None) -> Noise | Special:
        """The direction as ``sparing.valley`` takes it; ``initial`` are the weights before training."""
        if self.special:
            start = initial if self.kind == "initial" else None
            return Special(self.kind, initial=start, norm=settings.norm)  # type: ignore[arg-type]
        sign = {0.0: "raw", 1.0: "consistent"}.get(self.ratio, self.ratio)
        return Noise(self.kind, sign=sign, norm=settings.norm, group=self.group)  # type: ignore[arg-type]


def present(model: nn.Module, groups: Iterable[GroupName]) -> list[GroupName]:
    """Those groups that have a parameter that may move, in the same order."""
    found = []
    for group in groups:
        with contextlib.suppress(UserError):
            selected(model, group)
            found.append(group)
    return found


def curve_specs(settings: Settings, *, groups: Collection[str], started: bool) -> list[CurveSpec]:
    """Every curve that the settings want, each once though several parts share it."""
    wanted: list[CurveSpec] = []
    if "noises" in settings.parts:
        wanted += [CurveSpec(kind, ratio) for kind in settings.noises for ratio in (0.0, 1.0)]
    if "ratio" in settings.parts:
        wanted += [CurveSpec("gaussian", float(ratio)) for ratio in settings.ratios]
    if "groups" in settings.parts:
        kept = [group for group in settings.parameter_groups if group in groups]
        wanted += [CurveSpec("gaussian", ratio, group) for group in kept for ratio in (0.0, 1.0)]
    if "special" in settings.parts:
        wanted += [CurveSpec(kind) for kind in SPECIALS if started or kind != "initial"]
    # Parts overlap: a noise, a ratio and a group can name the same curve.
    return list(dict.fromkeys(wanted))


def try_(inputs: Inputs, settings: Settings) -> None:
    """Walk two steps, so that a measure that cannot be trusted is rejected before anything is written."""
    options = {"calibrate": inputs.calibrate, "statistics": settings.statistics, "seed": settings.seed}
    found = scan(inputs.model, inputs.evaluate, Noise("gaussian"), points=3, draws=1, widths=(0.1,), **options)  # type: ignore[arg-type]
    # Asking for the index raises if the direction of the metric is unknown.
    found.asymmetry[_leading(inputs, found.values)]


def measure_(record: Record, spec: CurveSpec, inputs: Inputs, settings: Settings, initial: Vector | None) -> None:
    """Walk along one direction: a row of "curves" per width, a row of "values" per draw and λ."""
    began = time.perf_counter()
    drawn = not spec.special and spec.kind != "one"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = scan(
            inputs.model, inputs.evaluate, spec.direction(settings, initial), calibrate=inputs.calibrate,
            statistics=settings.statistics, points=settings.points, widths=settings.distances,
            draws=1 if spec.special else settings.draws, precision=settings.precision if drawn else None,
            seed=settings.seed, workers=settings.workers,
        )  # fmt: skip
    sys.stderr.writelines(f"note: {TITLES[spec.kind]}, {spec.sign}, {spec.group}: {one.message}\n" for one in told)
    seconds = (time.perf_counter() - began) / len(found.curves)
    for curve in found.curves:
        number = len(record.table("curves"))
        columns = {"curve": number, "kind": spec.kind, "sign": spec.sign, "ratio": spec.ratio, "group": spec.group}
        record.add("curves", **columns, **numbers(curve), seconds=seconds)
        for draw in range(len(curve.consistency)):
            for at, step in enumerate(curve.lambdas):
                measured = {name: float(values[draw, at]) for name, values in curve.values.items()}
                record.add("values", curve=number, draw=draw, step=float(step), **measured)
        if spent := found.allocation:
            errors = {f"error_{part.metric}": part.error for part in spent.parts if part.width == curve.width}
            record.add(
                "precision", curve=number, kind=spec.kind, sign=spec.sign, group=spec.group, width=float(curve.width),
                draws=spent.draws, rows=spent.rows, evaluated=spent.evaluated, ended=spent.limit or "reached", **errors,
            )  # fmt: skip


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
        if metric in RISES:
            for side, width in zip(("minus", "plus"), curve.half_widths(metric), strict=True):
                row[f"half_width_{side}_{metric}"] = width if math.isfinite(width) else None
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


def histogram_(record: Record, model: nn.Module) -> None:
    """Histogram the scales of norm layers: rows of "scales" (a bar each) and "layers" (a layer each)."""
    found = []
    for name, module in model.named_modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        norm = isinstance(module, NORMS) or kind.endswith(("RMSNorm", "LayerNorm"))
        if norm and isinstance(weight, torch.Tensor):
            weight = weight.detach().flatten()
            share = float((weight > 0).float().mean())
            record.add("layers", layer=name, kind=kind, mean=float(weight.mean()), positive=share, count=len(weight))
            found.append(weight.float())
    if not found:
        return
    every = torch.cat(found).double().numpy()
    low, high = float(every.min()), float(every.max())
    edges = np.linspace(low, high if high > low else low + 1e-6, BINS + 1)
    # An edge at zero, so that no bar mixes signs.
    edges = np.sort(np.append(edges, 0.0)) if low < 0 < high else edges
    counts, _ = np.histogram(every, edges)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        record.add("scales", left=float(left), right=float(right), count=int(count))
