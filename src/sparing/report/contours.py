"""Contours of a value over a plane, with named points and a path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sparing.errors import require
from sparing.report.axes import dress, tick_texts
from sparing.report.cells import Scale, format_number
from sparing.report.figure import Canvas, Figure
from sparing.report.series import Axis

LEVELS: Final = 11  # edges of the filled bands (count)


def contours(
    across: Sequence[float], along: Sequence[float], values: Sequence[Sequence[float]], *, title: str,
    x: Axis, y: Axis, value: Axis, marks: Sequence[tuple[str, float, float]] = (),
    path: Sequence[tuple[float, float]] = (), caption: str = "",
) -> Figure:  # fmt: skip
    """Draw filled contours of rows of values (one for each y), at levels between which equally many points lie.

    Ranks, not heights: beside a wall a hundred times higher, levels at equal heights would leave the valley blank.
    """
    seen = [cell for row in values for cell in row if math.isfinite(cell)]
    require(len(set(seen)) > 1, "contours", f"{len(set(seen))} different values", "a level needs two", "look elsewhere")

    def draw(canvas: Canvas) -> None:
        import matplotlib
        import numpy as np
        from matplotlib.colors import BoundaryNorm

        edges = np.unique(np.quantile(seen, np.linspace(0, 1, LEVELS)))
        colours = matplotlib.colormaps["viridis_r"]
        held = np.ma.masked_invalid(np.array(values, dtype=float))
        axes, norm = canvas.axes, BoundaryNorm(edges, colours.N)
        axes.grid(visible=False)
        axes.patch.set(hatch="////", edgecolor=canvas.shades.rule)
        filled = axes.contourf(across, along, held, edges, cmap=colours, norm=norm, extend="neither")
        axes.contour(across, along, held, edges[1:-1], colors="white", linewidths=0.6, alpha=0.7)
        _mark(canvas, marks, path, middle=(across[0] + across[-1]) / 2)
        axes.set(xlim=(across[0], across[-1]), ylim=(along[0], along[-1]))
        dress(canvas, x, y, (Scale(1, ""), Scale(1, "")))
        bar = canvas.drawing.colorbar(
            filled, ax=axes, location="bottom", aspect=40, pad=0.02, anchor=(0.0, 1.0), spacing="uniform",
            ticks=edges[:: 5 if canvas.narrow else 2],
        )  # fmt: skip
        bar.outline.set_visible(False)
        bar.ax.set_xticklabels(tick_texts([float(f"{edge:.2g}") for edge in bar.get_ticks()]))
        bar.set_label(value.text(Scale(1, value.unit)), loc="left")

    places = "; ".join(f"{name} at {a:.3g}, {b:.3g}" for name, a, b in marks)
    alt = f"Contour map of {value.label} from {format_number(min(seen))} to {format_number(max(seen))}. {places}."
    holes = len(seen) < len(across) * len(along)
    note = f"{caption} Hatched: not finite.".strip() if holes else caption
    return Figure(title, alt, note, draw, (520.0, 430.0))


def _mark(
    canvas: Canvas, marks: Sequence[tuple[str, float, float]], path: Sequence[tuple[float, float]], middle: float
) -> None:
    """Draw named points, the name towards the middle, and a path."""
    axes = canvas.axes
    if path:
        dots = dict(zip(("x", "y"), zip(*path, strict=True), strict=True))
        axes.plot(dots["x"], dots["y"], "-o", color="white", markersize=5, linewidth=1.6, zorder=4)
        axes.plot(dots["x"], dots["y"], "-o", color="black", markersize=3.2, linewidth=0.7, zorder=5)
    for name, a, b in marks:
        axes.plot([a], [b], "o", color="black", markeredgecolor="white", markersize=8, zorder=6)
        box: dict[str, Any] = {"boxstyle": "round,pad=0.2", "fc": canvas.shades.paper, "ec": "none", "alpha": 0.85}
        right = a > middle
        axes.annotate(
            name, (a, b), (-8 if right else 8, 8), textcoords="offset points", ha="right" if right else "left",
            color=canvas.shades.ink, bbox=box, zorder=7,
        )  # fmt: skip
