"""Many small curves on common axes, and a histogram: pictures that a scan needs beside the usual plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sparing.errors import require
from sparing.report import Figure, plots
from sparing.report.axes import dress, tick_formatter
from sparing.report.cells import Scale
from sparing.report.figure import Canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW: Final = (104.0, 112.0)  # px: height of a row on a page and on a phone, where the note has a line of its own
_EDGES: Final = 78.0  # px: what stands above and below the rows


@dataclass(frozen=True, slots=True)
class Panel:
    """One small picture."""

    name: str  # at its upper left
    note: str  # at its upper right
    short: str  # the same on a phone
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    role: plots.Role = "ours"  # its colour and dash


def grid(
    panels: Sequence[Panel],
    *,
    columns: int,
    heads: Sequence[str],
    title: str,
    x: str,
    caption: str = "",
    alt: str = "",
    log: bool = False,
) -> Figure:
    """Draw panels in rows on common axes."""
    require(bool(panels), "plot", "no panel", "there is nothing to draw", "give at least one")
    rows = math.ceil(len(panels) / columns)

    def draw(canvas: Canvas) -> None:
        canvas.axes.remove()
        places = canvas.drawing.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, panel in zip(places.flat, panels, strict=False):
            _panel(canvas, axes, panel, log=log)
        # Only now: the axes are shared, and setting a limit ends their automatic scaling.
        if not log:
            places.flat[0].set_ylim(bottom=0)
        for axes in list(places.flat)[len(panels) :]:
            axes.remove()
        for axes, head in zip(places[0], heads, strict=False):
            axes.annotate(
                head, (0, 1), (0, 40 if canvas.narrow else 24), xycoords="axes fraction",
                textcoords="offset points", va="bottom",
                color=canvas.shades.ink, fontsize=11 if canvas.narrow else 12.5, fontweight="bold",
            )  # fmt: skip
        places[-1][0].set_xlabel(x, loc="left", fontsize=11)

    heights = (rows * _ROW[0] + _EDGES, rows * _ROW[1] + _EDGES)
    spoken = "; ".join(f"{panel.name}: {panel.note}" for panel in panels)
    return Figure(title, alt or f"Grid of small curves. {spoken}.", caption, draw, heights)


def _panel(canvas: Canvas, axes: Axes, panel: Panel, *, log: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    def seen(values: Sequence[float]) -> list[float]:
        return [value if math.isfinite(value) and (value > 0 or not log) else math.nan for value in values]

    colour, dash = canvas.colour(panel.role), plots.style(panel.role).dash
    axes.axvline(0, color=canvas.shades.rule, linewidth=1.0, zorder=1)
    axes.fill_between(panel.x, seen(panel.low), seen(panel.high), color=colour, alpha=0.2, linewidth=0, zorder=2)
    axes.plot(panel.x, seen(panel.mean), color=colour, linewidth=1.8, linestyle=(0, dash) if dash else "-", zorder=3)
    # On a phone there is no room for both on one line
    axes.set_title(panel.name, loc="left", fontsize=10.5, color=canvas.shades.ink, pad=18 if canvas.narrow else 4)
    note, side = (panel.short, "left") if canvas.narrow else (panel.note, "right")
    axes.annotate(
        note, (0 if canvas.narrow else 1, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", ha=side,
        va="baseline", fontsize=10.5, color=canvas.shades.quiet,
    )  # fmt: skip
    axes.tick_params(labelsize=10, length=2)
    if log:
        axes.set_yscale("log")
        # Without these, a span of a decade has labels at 2, 3, 4, ... that lie on each other
        axes.yaxis.set_major_locator(LogLocator(numticks=4))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(tick_formatter(log=log))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(tick_formatter())
    axes.margins(x=0.01)


Mark = Sequence[float]  # an index and the ends of its interval; NaN is left out


def forest(
    rows: Sequence[tuple[str, Sequence[Mark]]], *, names: Sequence[str], roles: Sequence[plots.Role],
    title: str, x: str, caption: str = "",
) -> Figure:  # fmt: skip
    """Draw indices from −1 to 1 as points with intervals, several beside each other in every row."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes
        axes.axvline(0, color=canvas.shades.quiet, linewidth=1.0, zorder=1)
        for at, (name, marks) in enumerate(rows):
            axes.annotate(
                name, (0, at - 0.32), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                color=canvas.shades.ink, fontsize=11.5, va="center",
            )  # fmt: skip
            for nth, (mark, role) in enumerate(zip(marks, roles, strict=True)):
                _mark(canvas, mark, at + 0.02 + 0.25 * nth, role, names[nth] if at == 0 else "")
        axes.set(ylim=(len(rows) - 0.35, -0.65), xlim=(-1.06, 1.06))
        dress(canvas, plots.Axis(x, low=-1.06, high=1.06), plots.Axis(""), (Scale(1, ""), Scale(1, "")))
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.0)}
        axes.legend(ncols=2, labelcolor=canvas.shades.ink, **place)

    spoken = "; ".join(
        f"{name} {', '.join(f'{what} {mark[0]:.2f}' for what, mark in zip(names, marks, strict=True))}"
        for name, marks in rows
    )
    height = 58.0 * len(rows) + 84
    return Figure(title, f"Points with intervals, {x}. {spoken}.", caption, draw, (height, height))


def _mark(canvas: Canvas, mark: Mark, at: float, role: plots.Role, name: str) -> None:
    colour, shape = canvas.colour(role), plots.style(role).marker
    value, low, high = (end if math.isfinite(end) else math.nan for end in mark)
    if math.isfinite(high - low):
        canvas.axes.hlines(at, low, high, color=colour, linewidth=2.0, zorder=2)
    canvas.axes.plot([value], [at], linestyle="none", marker=shape, markersize=8, color=colour, label=name, zorder=3)


def histogram(
    edges: Sequence[float], counts: Sequence[int], *, title: str, x: str, y: str, caption: str = ""
) -> Figure:
    """Draw counts between rising edges; what is below zero has another color."""

    def draw(canvas: Canvas) -> None:
        for left, right, count in zip(edges, edges[1:], counts, strict=False):
            role: plots.Role = "rival" if right <= 0 else "ours"
            canvas.axes.bar(
                left, count, right - left, align="edge", color=canvas.colour(role), edgecolor=canvas.shades.paper,
                linewidth=0.6, hatch="///" if role == "rival" else None, zorder=2,
            )  # fmt: skip
        if edges[0] < 0:
            canvas.axes.axvline(0, color=canvas.shades.quiet, linewidth=1.0, zorder=3)
        dress(canvas, plots.Axis(x), plots.Axis(y, low=0), (Scale(1, ""), Scale(1, "")))

    total, below = sum(counts), sum(n for right, n in zip(edges[1:], counts, strict=True) if right <= 0)
    alt = f"Histogram of {total:,} values of {x} from {edges[0]:.3g} to {edges[-1]:.3g}; {below:,} lie below zero."
    return Figure(title, alt, caption, draw, (260.0, 240.0))
