"""A value at every crossing of two directions: which layer trained when, how far each moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from sparing.errors import UserError
from sparing.report.axes import dress, tick_formatter
from sparing.report.cells import Scale, format_number
from sparing.report.figure import Canvas, Figure
from sparing.report.palette import style
from sparing.report.series import Axis, as_axis

if TYPE_CHECKING:
    from matplotlib.colors import Colormap, Normalize

Kind = Literal["switch", "sequential", "signed"]
Values = Sequence[Sequence[float]]


def heatmap(
    values: Values,
    *,
    title: str,
    x: Axis | str,
    y: Axis | str,
    x_edges: Sequence[float] | None = None,
    y_labels: Sequence[str] | None = None,
    kind: Kind = "switch",
    value: Axis | str = "",
    states: tuple[str, str] = ("frozen", "trained"),
    caption: str = "",
    alt: str = "",
) -> Figure:
    """Draw a map of rows (from the bottom) by columns.

    Args:
        values: One sequence per row, such as a layer; NaN is not measured.
        title: The finding, in words.
        x: Quantity and unit across.
        y: What a row is.
        x_edges: Where columns begin and the last ends, in the unit of x; 0, 1, 2, … by default.
        y_labels: Name of each row; its number by default.
        kind: "switch" for zeros and ones, "sequential" (viridis), or "signed" (blue, white at zero, vermilion).
        value: Quantity and unit of the values.
        states: What zero and one mean in a switch map.
        caption: More to say under the picture.
        alt: What it shows, in words; composed by default.

    Returns:
        The picture.

    Raises:
        UserError: If there are no values or rows differ in length.
    """
    rows = [[float(cell) for cell in row] for row in values]
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise UserError(
            "heat map", got=f"{len(rows)} rows", why="rows must be of one length, at least 1", do="fill gaps with NaN"
        )
    across, up, what = as_axis(x), as_axis(y), as_axis(value)
    edges = [float(edge) for edge in (x_edges if x_edges is not None else range(len(rows[0]) + 1))]
    names = list(y_labels) if y_labels is not None else [str(at) for at in range(len(rows))]

    def draw(canvas: Canvas) -> None:
        scale = across.scaled(edges)
        shown = [edge / scale.one for edge in edges]
        if kind == "switch":
            _switches(canvas, rows, shown, states)
        else:
            _shades(canvas, rows, shown, kind, what)
        canvas.axes.set(xlim=(shown[0], shown[-1]), ylim=(0, len(rows)))
        dress(canvas, across, up, (scale, Scale(1, "")))
        # as many rows are named as there is room for
        at = range(0, len(names), math.ceil(len(names) / 32))
        canvas.axes.set_yticks([row + 0.5 for row in at], [names[row] for row in at])

    holes = not all(math.isfinite(cell) for row in rows for cell in row)
    note = f"{caption} Hatched: not measured.".strip() if holes else caption
    height = max(150.0, min(460.0, 14.0 * len(rows))) + (70 if kind == "switch" else 125)
    return Figure(title, alt or _in_words(rows, across, up, what, kind, states), note, draw, (height, height + 10))


def _switches(canvas: Canvas, rows: Values, edges: Sequence[float], states: tuple[str, str]) -> None:
    """Draw one bar per run of ones: a few shapes instead of one per cell."""
    from matplotlib.patches import Patch

    on, off = canvas.colour("ours"), canvas.shades.panel
    for at, row in enumerate(rows):
        canvas.axes.broken_barh([(edges[0], edges[-1] - edges[0])], (at + 0.06, 0.88), facecolor=off, linewidth=0)
        canvas.axes.broken_barh(_runs(row, edges), (at + 0.06, 0.88), facecolor=on, linewidth=0)
    frozen = Patch(facecolor=off, edgecolor=canvas.shades.rule, linewidth=0.8, label=states[0])
    keys = [Patch(facecolor=on, label=states[1]), frozen]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1.0), "ncols": 2, "borderaxespad": 0.5}
    canvas.axes.legend(handles=keys, labelcolor=canvas.shades.ink, **place)
    canvas.axes.grid(visible=False)


def _runs(row: Sequence[float], edges: Sequence[float]) -> list[tuple[float, float]]:
    """Spans (start, length) where a row is on."""
    spans: list[tuple[float, float]] = []
    for at, cell in enumerate(row):
        if not cell or math.isnan(cell):
            continue
        start, end = edges[at], edges[at + 1]
        if spans and math.isclose(sum(spans[-1]), start):
            start = spans.pop()[0]
        spans.append((start, end - start))
    return spans


def _shades(canvas: Canvas, rows: Values, edges: Sequence[float], kind: Kind, what: Axis) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    scale = what.scaled([cell for row in rows for cell in row])
    data = np.array(rows, dtype=float) / scale.one
    canvas.axes.grid(visible=False)
    # cells that are not measured are masked, and the hatch behind shows through
    canvas.axes.patch.set(hatch="////", edgecolor=canvas.shades.rule)
    colours, norm = _ramp(data, kind)
    # pixels inside the SVG: thousands of cells as shapes would make a page of megabytes
    mesh = canvas.axes.pcolormesh(
        edges, range(len(rows) + 1), np.ma.masked_invalid(data), cmap=colours, norm=norm, rasterized=True
    )
    bar = canvas.drawing.colorbar(
        mesh, ax=canvas.axes, location="bottom", aspect=40, pad=0.02, shrink=0.6, anchor=(0.0, 1.0)
    )
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10])
    bar.formatter = tick_formatter()
    bar.set_label(what.text(scale), loc="left")


def _ramp(data: Any, kind: Kind) -> tuple[Colormap, Normalize]:
    import matplotlib
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    found = data[np.isfinite(data)] if np.isfinite(data).any() else np.zeros(1)
    if kind == "sequential":
        return matplotlib.colormaps["viridis"], Normalize(float(found.min()), float(found.max()))
    # symmetric limits, so that zero is white
    most = float(np.abs(found).max()) or 1.0
    ends = [style("ours").colour, "#ffffff", style("rival").colour]
    return LinearSegmentedColormap.from_list("signed", ends), Normalize(-most, most)


def _in_words(rows: Values, across: Axis, up: Axis, what: Axis, kind: Kind, states: tuple[str, str]) -> str:
    cells = [cell for row in rows for cell in row if math.isfinite(cell)]
    start = f"Map of {len(rows)} rows ({up.label}) by {len(rows[0])} columns ({across.label})"
    if not cells:
        return f"{start}, nothing measured."
    if kind == "switch":
        return f"{start}: {states[1]} in {format_number(100 * sum(map(bool, cells)) / len(cells), '%')} of the cells."
    return (
        f"{start}: {what.label} from {format_number(min(cells), what.unit)} to {format_number(max(cells), what.unit)}."
    )
