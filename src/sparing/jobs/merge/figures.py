"""The pictures of a merge, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sparing.report import Figure, Record, format_number, plots

Rows = Sequence[Mapping[str, Any]]

UNITS: Final = {"loss": "nats", "error": "%"}  # of the metrics, as pictures show them

MOST_BARS: Final = 16  # blocks that are drawn as bars; more are a line (count)


def display_value(metric: str, value: float) -> float:
    """A value of a metric in the unit of pictures: losses in nats, errors in per cent."""
    return 100 * value if metric == "error" else value


def in_words(
    metric: str, value: float, low: float | None = None, high: float | None = None, *, difference: bool = False
) -> str:
    """A value of a metric in words; a difference has its sign, and errors in percentage points.

    Example:
        >>> in_words("error", 0.031), in_words("error", 0.5, difference=True)
        ('3.10 %', '+50.0 percentage points')
    """
    ends = [None if end is None else display_value(metric, end) for end in (low, high)]
    text = format_number(display_value(metric, value), low=ends[0], high=ends[1])
    unit = "percentage points" if difference and metric == "error" else UNITS[metric]
    return f"{'+' if difference and value > 0 else ''}{text} {unit}"


def score_figure(record: Record, metric: str) -> Figure:
    """Every parent, the merge as predicted and as measured."""
    models = record.table("models")
    parents = [row for row in models if row["kind"] == "parent"]
    (merged,) = [row for row in models if row["kind"] == "merge"]
    (gap,) = [row for row in record.table("gap") if row["metric"] == metric]
    mean = sum(row[metric] for row in parents) / len(parents)
    bars = [plots.Bar(row["model"], _drawn(metric, row[metric]), "baseline") for row in parents]
    bars.append(plots.Bar("mean of these", _drawn(metric, mean), "reference"))
    if is_finite(gap["predicted"]) and math.isfinite(mean):
        value, least, most = (display_value(metric, mean + gap[f"predicted{end}"]) for end in ("", "_low", "_high"))
        bars.append(plots.Bar("the merge, predicted", value, "extension", low=max(least, 0.0), high=most))
    ends = [
        _drawn(metric, mean + gap[f"gap_{end}"]) if is_finite(gap[f"gap_{end}"]) else None for end in ("low", "high")
    ]
    low = None if ends[0] is None else max(ends[0], 0.0)
    bars.append(plots.Bar("the merge, measured", _drawn(metric, merged[metric]), "ours", low=low, high=ends[1]))
    side = "above" if gap["gap"] > 0 else "below"
    size = in_words(metric, abs(gap["gap"]), difference=True).removeprefix("+")
    title = f"The merge is {size} {side} the mean of its parents"
    if not is_finite(gap["gap"]):
        title = f"The {metric} of the merge, or of a parent, is not finite"
    note = "Predicted: where nine in ten pairs as alike as these lie. Measured: 95 % interval over test rows."
    return plots.bars(bars, title=title, value=plots.Axis(f"{metric} on test rows", UNITS[metric]), caption=note)


def _drawn(metric: str, value: float) -> float | None:
    """The length of a bar; none where the value is not finite."""
    return display_value(metric, value) if is_finite(value) else None


def is_finite(value: object) -> bool:
    """Whether a cell holds a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def sign_figure(record: Record) -> Figure | None:
    """Sign agreement of the first two models, block by block; None where no block has signs to compare."""
    rows = [row for row in record.table("signs") if is_finite(row["agreement"])]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["agreement"])
    title = f"Signs agree least in {least['block']}: {format_number(100 * least['agreement'])} %"
    chance = 100 * sum(row["chance"] for row in rows) / len(rows)
    axis = plots.Axis("weights of equal sign", "%", low=0, high=100)
    note = "Strangers agree where chance has it; models that were fine-tuned from one ancestor agree almost everywhere."
    if len(rows) <= MOST_BARS:
        bars = [plots.Bar(row["block"], 100 * row["agreement"], "ours") for row in rows]
        return plots.bars(bars, title=title, value=axis, mark=(chance, "strangers"), caption=note)
    places = list(range(1, len(rows) + 1))
    lines = [
        plots.Series("these two", places, [100 * row["agreement"] for row in rows], "ours"),
        plots.Series("strangers", places, [100 * row["chance"] for row in rows], "baseline"),
    ]
    return plots.lines(lines, title=title, x="block, in order of name", y=axis, caption=note)


def between_figure(record: Record, metric: str) -> Figure | None:
    """The metric along the line from the first model to the second, if it was measured."""
    rows = record.table("between")
    if not rows:
        return None
    t, values = [row["t"] for row in rows], [display_value(metric, row[metric]) for row in rows]
    chord = [values[0] + at * (values[-1] - values[0]) for at in t]
    half = len(rows) // 2
    dip = values[half] - chord[half]
    if not math.isfinite(dip):
        title = f"Half-way, or at an end, the {metric} is not finite"
    elif abs(dip) < 1e-9:
        title = f"Half-way, the {metric} is the mean of both ends"
    else:
        amount = f"{format_number(abs(dip))} {'percentage points' if metric == 'error' else 'nats'}"
        title = f"Half-way, the {metric} is {amount} {'above' if dip > 0 else 'below'} the straight line"
    lines = [plots.Series("weights mixed", t, values, "ours"), plots.Series("straight line", t, chord, "baseline")]
    return plots.lines(
        lines, title=title, x="share of B in the mixed weights (0 is A, 1 is B)",
        y=plots.Axis(f"{metric} on test rows", UNITS[metric]),
    )  # fmt: skip
