"""Pictures and words of lines, planes, surfaces, curvature and sharpness, from the record of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sparing.jobs.scan.figures import Rows, metric_of, with_unit
from sparing.report import Figure, Record, format_number, plots
from sparing.report.contours import contours
from sparing.valley.scans.plots import axis

ROLES: Final[tuple[plots.Role, ...]] = ("ours", "rival")

# share of the largest eigenvalue below zero from which the smallest counts as negative: the accuracy of both
NEGATIVE: Final = 0.01

LINES: Final = """\
The straight line from the model (0) to another (1); batch-norm statistics are re-estimated at every point. **Gap**: \
how much worse the average is than the mean of the ends, below zero better; **barrier**: the most by which the line \
lies above the ends' own."""

PLANE: Final = """\
Weights on the plane through the three models. Distances are true ones in the space of weights: the picture is a cut, \
not a projection of the valley."""

SURFACE: Final = """\
Two draws of Gaussian noise, nearly at right angles to each other. Smooth walls in two drawn directions say little \
about the others."""

CURVATURE: Final = """\
Of the mean loss over the first {rows} measured rows, which are not the rows it was trained on. The trace is estimated \
by random signs, eigenvalues by Lanczos iteration. {verdict}"""

SHARPNESS: Final = """\
How far the mean loss over the first {rows} measured rows can rise within a ball: {plain} around the weights (SAM), \
and {adaptive} relative to the size of each weight (ASAM), which scaling a layer up and the next one down does not \
change. **First step** is what SAM itself computes; **rise** the highest point of twenty steps: the maximum is at \
least that."""


def line_figure(record: Record) -> Figure | None:
    """The metric that is drawn first, along the line to each other model."""
    metric, rows = metric_of(record), record.table("line")
    names = list(dict.fromkeys(row["towards"] for row in rows))
    if not names:
        return None
    lines = []
    for name, role in zip(names, ROLES, strict=False):
        mine = [row for row in rows if row["towards"] == name]
        x, y = ([row[column] for row in mine] for column in ("position", metric))
        lines.append(plots.Series(f"towards {name}", x, y, role))
    gaps = {row["towards"]: row.get(f"gap_{metric}") for row in record.table("lines")}
    told = " and ".join(f"{_gap(gaps[name])} {name}" for name in names)
    title = f"Half-way, the {metric} is {told} than the mean of the ends"
    return plots.lines(
        lines, title=title, x=plots.Axis("position: 0 is the model, 1 the other", low=0, high=1), y=axis(metric)
    )


def _gap(gap: float | None) -> str:
    if gap is None:
        return "not comparable towards"
    return f"{format_number(abs(gap))} {'worse' if gap > 0 else 'better'} towards"


def plane_figure(record: Record) -> Figure | None:
    """Contours of the metric that is drawn first over the plane of three models."""
    metric, rows, places = metric_of(record), record.table("plane"), record.table("places")
    if not rows:
        return None
    models = [row for row in places if row["kind"] == "model"]
    path = [row for row in places if row["kind"] == "checkpoint"]
    told = ", ".join(f"{format_number(row[metric])} at {row['name']}" for row in models)
    off = (
        f" Dots: {len(path)} checkpoints in order, projected; up to {max(row['off'] for row in path):.0%} of a "
        if path
        else ""
    )
    off += "checkpoint's distance from the model lies off the plane." if path else ""
    first, second, third = (row["name"] for row in models)
    return _map(
        rows, metric, title=f"The {metric} is {told}",
        x=plots.Axis(f"distance from {first} towards {second}"), y=plots.Axis(f"distance towards {third}"),
        marks=[(row["name"], row["x"], row["y"]) for row in models], path=[(row["x"], row["y"]) for row in path],
        caption=f"{with_unit(metric).capitalize()}; levels by rank: each holds as many points.{off}",
    )  # fmt: skip


def surface_figure(record: Record) -> Figure | None:
    """Contours of the metric that is drawn first over two draws of noise."""
    metric, rows = metric_of(record), record.table("surface")
    if not rows:
        return None
    here = next(row[metric] for row in rows if row["x"] == row["y"] == 0)
    return _map(
        rows, metric, title=f"The {metric} is {format_number(here)} in the middle of two noises",
        x=plots.Axis("λ along the first noise"), y=plots.Axis("λ along the second noise"),
        marks=[("θ", 0.0, 0.0)], path=(),
        caption=f"{with_unit(metric).capitalize()}; levels by rank: each holds as many points.",
    )  # fmt: skip


def _map(rows: Rows, metric: str, **words: Any) -> Figure | None:
    """Contours of rows with x and y; nothing where they are all of one height."""
    x, y = (sorted({row[name] for row in rows}) for name in ("x", "y"))
    found = {(row["x"], row["y"]): row[metric] for row in rows}
    values = [[float("nan") if found[a, b] is None else found[a, b] for a in x] for b in y]
    if len({cell for row in values for cell in row if cell == cell}) < 2:
        return None
    return contours(x, y, values, value=axis(metric), **words)


def curvature_verdict(record: Record) -> str:
    """Whether the model stands at a minimum of the mean loss over these rows, in words; "" if unmeasured."""
    found = {row["quantity"]: row["value"] for row in record.table("curvature")}
    if not found:
        return ""
    top, low = found["eigenvalue 1"], found["smallest eigenvalue"]
    slope = f"the gradient has length {format_number(found['norm of the gradient'])}"
    if low < -NEGATIVE * abs(top):
        return (
            f"**Not a minimum**: the Hessian has eigenvalues from {format_number(low)} to {format_number(top)}, so the "
            f"loss falls along some line, and {slope}."
        )
    return f"The largest eigenvalue is {format_number(top)}; none is clearly negative, and {slope}."


def curvature_text(record: Record) -> str:
    """What was computed, and whether it is a minimum."""
    return CURVATURE.format(rows=record.settings["curvature_rows"], verdict=curvature_verdict(record))


def sharpness_text(record: Record) -> str:
    """What was searched."""
    settings = record.settings
    radii = {"plain": settings["radius"], "adaptive": settings["adaptive_radius"]}
    return SHARPNESS.format(rows=settings["curvature_rows"], **radii)


def shape_answers(record: Record) -> list[str]:
    """A sentence for each of these that was measured, with its number."""
    metric = metric_of(record)
    told: list[str] = []
    told += [
        f"The average with {row['towards']} is **{_gap(gap).removesuffix(' towards')}** in {metric} than its two ends."
        for row in record.table("lines")
        if (gap := row.get(f"gap_{metric}")) is not None
    ]
    told += [verdict] if (verdict := curvature_verdict(record)) else []
    told += [
        f"Within a ball of radius {row['radius']:g} the loss can rise by **{format_number(row['rise'], 'nat')}**."
        for row in record.table("sharpness")
        if row["ball"] == "plain"
    ]
    return told


def place_rows(record: Record) -> Sequence[dict[str, Any]]:
    """Rows of the table of models and checkpoints, coordinates and what was measured there."""
    return [{name: cell for name, cell in row.items() if name != "kind"} for row in record.table("places")]
