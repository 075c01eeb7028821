"""Small multiples of predicted against measured, in the look of the other plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparing.report import Figure
from sparing.report.axes import tick_texts
from sparing.report.figure import Canvas
from sparing.report.palette import Role, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
BYTES = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"}


@dataclass(frozen=True, slots=True)
class Points:
    """Pairs of one kind."""

    label: str
    """What it is called in the legend."""
    predicted: Sequence[float]
    """Across."""
    measured: Sequence[float]
    """Upwards."""
    role: Role
    """Its colour and marker."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity."""

    title: str
    """The quantity."""
    unit: str
    """Its unit, shown in the title; ``B`` has powers of a thousand as ticks."""
    points: Sequence[Points]
    """What is drawn; the first lies on top."""
    log: bool = True
    """Whether both axes are logarithmic; then points that are not positive are left out."""


def panels(shown: Sequence[Panel], *, title: str, caption: str) -> Figure:
    """Draw the panels, three in a row.

    Args:
        shown: What to draw.
        title: The finding, in words.
        caption: More to say under the picture.

    Returns:
        The picture.
    """
    shown = [replace(one, points=[kind for kind in one.points if kind.measured]) for one in shown]
    counts = "; ".join(f"{one.title.lower()}, {sum(len(points.measured) for points in one.points)}" for one in shown)
    rows = math.ceil(len(shown) / COLUMNS)

    def draw(canvas: Canvas) -> None:
        canvas.axes.remove()
        grid = canvas.drawing.subplots(rows, COLUMNS, squeeze=False)
        for at, axes in enumerate(grid.flat):
            if at < len(shown):
                _panel(canvas, axes, shown[at])
            else:
                axes.set_axis_off()
        canvas.drawing.supxlabel("predicted", color=canvas.shades.quiet, fontsize=12)
        canvas.drawing.supylabel("measured", color=canvas.shades.quiet, fontsize=12)

    alt = f"Scatter plots of measured against predicted values with the line of equality, pairs each: {counts}."
    return Figure(title, alt, caption, draw, (205.0 * rows, 205.0 * rows))


def _panel(canvas: Canvas, axes: Axes, panel: Panel) -> None:
    """Points, the identity, few ticks, and names of more than one kind."""
    pairs = [[(a, b) for a, b in zip(one.predicted, one.measured, strict=True) if not panel.log or min(a, b) > 0]
             for one in panel.points]  # fmt: skip
    values = [value for kind in pairs for pair in kind for value in pair]
    low, high = _reach(min(values), max(values), log=panel.log)
    if panel.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.plot((low, high), (low, high), color=canvas.shades.quiet, linewidth=0.9, zorder=1)
    for rank, (one, kind) in enumerate(zip(panel.points, pairs, strict=True)):
        apart = _apart(kind, low, high, log=panel.log)
        look = style(one.role)
        axes.plot(
            *zip(*apart, strict=True), linestyle="none", marker=look.marker, markersize=4.4, zorder=9 - rank,
            markerfacecolor=canvas.colour(one.role), markeredgecolor=canvas.shades.paper, markeredgewidth=0.4,
            label=one.label,
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_box_aspect(1)
    axes.grid(visible=True, axis="both")
    _ticks(axes, panel, low, high)
    axes.set_title(
        panel.title + (f" ({panel.unit})" if panel.unit and panel.unit != "B" else ""),
        fontsize=11,
        color=canvas.shades.ink,
    )
    if len(panel.points) > 1:
        axes.legend(fontsize=8.5, loc="best", handletextpad=0.1, labelspacing=0.25)


def _apart(pairs: Sequence[tuple[float, float]], low: float, high: float, *, log: bool) -> list[tuple[float, float]]:
    """Of pairs that would hide each other, less than a hundredth of the axis apart, one: the file stays small."""
    scale = math.log if log else float
    span = scale(high) - scale(low)

    def place(pair: tuple[float, float]) -> tuple[int, ...]:
        return tuple(round(100 * (scale(value) - scale(low)) / span) for value in pair)

    return list({place(pair): pair for pair in pairs}.values())


def _reach(low: float, high: float, *, log: bool) -> tuple[float, float]:
    """The ends of both axes, a little beyond the values."""
    if log:
        room = (high / low) ** 0.08
        return low / room, high * room
    room = 0.08 * (high - low)
    return low - room, high + room


def _ticks(axes: Axes, panel: Panel, low: float, high: float) -> None:
    """The same few ticks on both axes."""
    if panel.log:
        marks = _powers(low, high)
        texts = [_bytes(value) for value in marks] if panel.unit == "B" else tick_texts(marks, log=True)
    else:
        marks = _round(low, high)
        texts = tick_texts(marks)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(marks, texts, fontsize=9)
        axis.set_ticks([], minor=True)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten, every second one where there are many; threes, or twos and fives, too where few would stand."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks: list[float] = []
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(map(float, range(1, 10)))):
        marks = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(marks) > 1:
            break
    return marks[:: 1 + (len(marks) > 4)]


def _bytes(value: float) -> str:
    """A round number of bytes."""
    factor, unit = next((factor, unit) for factor, unit in BYTES.items() if value >= factor)
    return f"{value / factor:g} {unit}"


def _round(low: float, high: float) -> list[float]:
    """Three to five round values."""
    step = next(s for p in range(-3, 5) for s in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if (high - low) / s <= 4.5)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
