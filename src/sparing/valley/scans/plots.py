"""Figures of curves and surfaces; the title says how lopsided they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from sparing.report import plots
from sparing.report.contours import contours

if TYPE_CHECKING:
    from sparing.report import Figure
    from sparing.valley.scans.curve import Curve
    from sparing.valley.scans.intervals import Index
    from sparing.valley.scans.plane import Plane
    from sparing.valley.scans.surface import Surface

ROLES: Final[tuple[plots.Role, ...]] = ("ours", "rival", "good", "second_rival", "extension", "reference", "baseline")
# asymmetry index beyond which a single draw is called lopsided: the paper's raw noises stay below it
CLEAR: Final = 0.35


def curve_figure(curves: Sequence[Curve], metric: str, *, names: Sequence[str] = ()) -> Figure:
    """Draw at most seven curves over λ, each as the mean over draws with its interval; nonfinite values are gaps."""
    labels = list(names) or _labels(curves)
    lines = []
    for curve, label, role in zip(curves, labels, ROLES, strict=False):
        mean = np.where(np.isfinite(curve.mean(metric)), curve.mean(metric), np.nan)
        low, high = (np.where(np.isfinite(end), end, mean).tolist() for end in curve.band(metric))
        band = (low, high, curve.draws) if curve.draws > 1 else ()
        lines.append(plots.Series(label, curve.lambdas.tolist(), mean.tolist(), role, *band))
    return plots.lines(
        lines,
        title=_title(curves[0], metric), x=plots.Axis("λ"), y=axis(metric),
        between="95 % interval of the mean over draws", caption=_caption(curves, metric, labels),
    )  # fmt: skip


def surface_figure(surface: Surface, metric: str) -> Figure:
    """Draw a plane as a heatmap, the first direction across, the second upwards."""
    values = surface.values[metric]
    half = float(surface.lambdas[-1] - surface.lambdas[-2]) / 2
    edges = [float(at) - half for at in surface.lambdas] + [float(surface.lambdas[-1]) + half]
    middle = len(surface.lambdas) // 2
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (math.nan, math.nan)
    first, second = surface.directions
    return plots.heatmap(
        np.where(np.isfinite(values), values, np.nan).T.tolist(),
        title=f"{_words(metric)} is {values[middle, middle]:.3g} in the middle and between {low:.3g} and {high:.3g}",
        x=plots.Axis(f"λ along {first}"), y=plots.Axis(f"λ along {second}"), x_edges=edges,
        y_labels=[f"{at:+.2g}".replace("-", "−") if at else "0" for at in surface.lambdas],
        kind="sequential", value=axis(metric),
        caption=f"SCR {surface.consistency[0]:.2f} and {surface.consistency[1]:.2f}, cosine {surface.cosine:+.2f}; "
        f"width {surface.width:g}; batch-norm statistics: {surface.statistics}.",
    )  # fmt: skip


def plane_figure(plane: Plane, metric: str) -> Figure:
    """Draw a plane as filled contours with its three models, and checkpoints as a line of dots."""
    ends = plane.at_corners[metric]
    told = ", ".join(f"{value:.3g} at {name}" for name, value in zip(plane.names, ends, strict=True))
    seen = plane.values[metric][np.isfinite(plane.values[metric])]
    span = f"{seen.min():.3g} to {seen.max():.3g}" if seen.size else "nowhere finite"
    off = ""
    if len(plane.path):
        off = (
            f" Dots: {len(plane.path)} checkpoints in order, projected; up to {plane.off.max():.0%} of a checkpoint's "
        )
        off += "distance from the first model lies off the plane."
    return contours(
        plane.x.tolist(), plane.y.tolist(), plane.values[metric].T.tolist(), value=axis(metric),
        title=f"{_words(metric)} over the plane of three models: {told}",
        x=plots.Axis(f"distance from {plane.names[0]} towards {plane.names[1]}, in units of the weights"),
        y=plots.Axis(f"distance towards {plane.names[2]}"),
        marks=[(name, float(a), float(b)) for name, (a, b) in zip(plane.names, plane.corners, strict=True)],
        path=[(float(a), float(b)) for a, b in plane.path],
        caption=f"On the grid {span}. Levels by rank: each holds as many points.{off} "
        f"Batch-norm statistics: {plane.statistics}.",
    )  # fmt: skip


def axis(metric: str) -> plots.Axis:
    """The axis of a metric, with its unit."""
    names = {"loss": "cross-entropy", "error": "error (share of rows)"}
    return plots.Axis(names.get(metric, metric), "nat" if metric == "loss" else "")


def _labels(curves: Sequence[Curve]) -> list[str]:
    """Name each curve by what distinguishes it from the others."""
    parts = {
        "direction": [one.direction for one in curves], "width": [f"width {one.width:g}" for one in curves],
        "statistics": [f"{one.statistics} statistics" for one in curves],
    }  # fmt: skip
    distinct = [name for name, words in parts.items() if len(set(words)) > 1] or ["direction"]
    return [", ".join(parts[name][k] for name in distinct) for k in range(len(curves))]


def _title(curve: Curve, metric: str) -> str:
    found, branch = curve.asymmetry[metric], curve.branches[metric]
    if not math.isfinite(branch.rise_minus) and not math.isfinite(branch.rise_plus):
        return f"{_words(metric)} is not finite on either side"
    if math.isnan(found.value):
        return f"{_words(metric)} hardly moves: its change is not above the noise floor of {found.floor:.2g}"
    return f"{_words(metric)}, {_verdict(found)}: {branch.minus:.3g} on −, {branch.plus:.3g} on +"


def _verdict(found: Index) -> str:
    """Which side is flatter, if the draws can tell and the curve has a minimum at λ = 0."""
    if not found.minimum:
        sides = "on both sides" if found.falls == "both" else f"on the {found.falls} side"
        return f"not a minimum, better {sides}"
    low, high = found.interval
    clear = abs(found.value) >= CLEAR if found.n == 1 else low > 0 or high < 0
    return f"flatter on the {'+' if found.value > 0 else '−'} side" if clear else "no telling which side is flatter"


def _caption(curves: Sequence[Curve], metric: str, labels: Sequence[str]) -> str:
    parts = []
    for one, label in zip(curves, labels, strict=False):
        start = f"{label}: " if len(curves) > 1 else f"{one.direction}: "
        parts.append(f"{start}asymmetry {one.asymmetry[metric]}, SCR {one.consistency.mean():.2f}")
    ways = " and ".join(sorted({one.statistics for one in curves}))
    gaps = any(not np.isfinite(one.mean(metric)).all() for one in curves)
    text = "; ".join(parts)
    note = " Gaps: not finite." if gaps else ""
    return f"{text[:1].upper()}{text[1:]}. Batch-norm statistics: {ways}.{note}"


def _words(metric: str) -> str:
    return {"loss": "Cross-entropy"}.get(metric, metric[:1].upper() + metric[1:])
