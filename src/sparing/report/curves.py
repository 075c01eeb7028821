"""Lines over steps, and points between two quantities, each named where it is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparing.errors import UserError
from sparing.report.axes import dress, finite, write_text
from sparing.report.cells import Scale, fold, format_number
from sparing.report.figure import Canvas, Figure
from sparing.report.labels import Box, place, spread
from sparing.report.palette import style
from sparing.report.series import Axis, Series, as_axis

_FEW = 14  # points: up to here each one is marked


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | str,
    y: Axis | str,
    between: str = "lowest to highest",
    caption: str = "",
    alt: str = "",
) -> Figure:
    """Draw values over positions, one line per series, named at its end.

    Series with a spread get a band; a single run is a thin line; published points are open markers without a line.

    Args:
        series: What to draw; the first lies on top.
        title: The finding, in words.
        x: Quantity and unit of the positions.
        y: Quantity and unit of the values.
        between: What the band spans, for the caption.
        caption: More to say under the picture.
        alt: What it shows, in words; composed from the ends of the lines by default.

    Returns:
        The picture.

    Raises:
        UserError: If no series has a point that can be drawn.
    """
    across, up = as_axis(x), as_axis(y)
    shown = [_rising(one) for one in _with_points(series)]
    scales = _scales(shown, across, up)

    def draw(canvas: Canvas) -> None:
        for rank, one in enumerate(shown):
            _line(canvas, one, scales, front=len(shown) - rank)
        canvas.axes.margins(x=0.01, y=0.06)
        dress(canvas, across, up, scales)
        _name_ends(canvas, [one for one in shown if not one.source], scales)
        _name_points(canvas, [one for one in shown if one.source], scales, around=shown)

    parts = []
    for one in shown:
        ys = finite(one.y)
        parts.append(f"{one.name} goes from {format_number(ys[0], up.unit)} to {format_number(ys[-1], up.unit)}")
    alt = alt or f"Line plot of {up.label} over {across.label}. {'; '.join(parts)}."
    return Figure(title, alt, with_spread(caption, shown, between), draw, (330.0, 290.0))


def scatter(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis | str,
    y: Axis | str,
    between: str = "lowest to highest",
    caption: str = "",
    alt: str = "",
) -> Figure:
    """Draw points between two quantities, each series named beside its last point.

    Args:
        series: What to draw; a series may be one point.
        title: The finding, in words.
        x: Quantity and unit across.
        y: Quantity and unit upwards.
        between: What the bars span, for the caption.
        caption: More to say under the picture.
        alt: What it shows, in words; composed from the points by default.

    Returns:
        The picture.

    Raises:
        UserError: If no series has a point that can be drawn.
    """
    across, up = as_axis(x), as_axis(y)
    shown = _with_points(series)
    scales = _scales(shown, across, up)

    def draw(canvas: Canvas) -> None:
        for one in shown:
            xs, ys = _in_unit(one.x, scales[0]), _in_unit(one.y, scales[1])
            if one.low is not None and one.high is not None:
                low, high = _in_unit(one.low, scales[1]), _in_unit(one.high, scales[1])
                canvas.axes.vlines(xs, low, high, color=canvas.colour(one.role), linewidth=1.5)
            canvas.axes.plot(xs, ys, linestyle="none", zorder=4, **_marker(canvas, one, size=9))
        canvas.axes.margins(x=0.14, y=0.14)
        canvas.axes.grid(visible=True, axis="both")
        dress(canvas, across, up, scales)
        _name_points(canvas, shown, scales, around=shown)

    parts = []
    for one in shown:
        (at, reached), name = _last(one) or (math.nan, math.nan), one.name
        parts.append(f"{name} at {format_number(at, across.unit)}, {format_number(reached, up.unit)}")
    alt = alt or f"Scatter plot of {up.label} against {across.label}: {'; '.join(parts)}."
    return Figure(title, alt, with_spread(caption, shown, between), draw, (350.0, 320.0))


def _with_points(series: Sequence[Series]) -> list[Series]:
    shown = [one for one in series if _last(one) is not None]
    if not shown:
        raise UserError(
            "plot", got="no finite point", why="there is nothing to draw", do="give a series with measured values"
        )
    return shown


def _rising(one: Series) -> Series:
    """The same points from left to right, so that the last one is the end of the line."""
    order = sorted(range(len(one.x)), key=lambda at: one.x[at])

    def sort(values: Sequence[float]) -> list[float]:
        return [values[at] for at in order]

    low, high = (sort(side) if side is not None else None for side in (one.low, one.high))
    return replace(one, x=sort(one.x), y=sort(one.y), low=low, high=high)


def _last(one: Series) -> tuple[float, float] | None:
    points = [(a, b) for a, b in zip(one.x, one.y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return points[-1] if points else None


def _scales(shown: Sequence[Series], across: Axis, up: Axis) -> tuple[Scale, Scale]:
    tops = [value for one in shown for values in (one.y, one.high or ()) for value in values]
    return across.scaled([value for one in shown for value in one.x]), up.scaled(tops)


def _in_unit(values: Sequence[float], scale: Scale) -> list[float]:
    return [float(value) / scale.one for value in values]


def _marker(canvas: Canvas, one: Series, *, size: float) -> dict[str, Any]:
    colour = canvas.colour(one.role)
    edge = canvas.shades.ink if one.role == "warning" else canvas.shades.paper
    hollow = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.6}
    solid = {"markerfacecolor": colour, "markeredgecolor": edge, "markeredgewidth": 0.9}
    return {"marker": style(one.role).marker, "markersize": size, **(hollow if one.source else solid)}


def _line(canvas: Canvas, one: Series, scales: tuple[Scale, Scale], *, front: int) -> None:
    xs, ys = _in_unit(one.x, scales[0]), _in_unit(one.y, scales[1])
    colour, dash = canvas.colour(one.role), style(one.role).dash
    stroke = "none" if one.source else (0, dash) if dash else "-"
    last = max(at for at, value in enumerate(ys) if math.isfinite(value))
    # many points: a marker only at the end, beside the name, to tell the lines apart without colour
    marks = None if len(xs) <= _FEW or one.source else [last]
    width = 2.0 if one.n is not None and one.n > 1 else 1.4
    marker = _marker(canvas, one, size=6)
    canvas.axes.plot(
        xs, ys, color=colour, linestyle=stroke, linewidth=width, markevery=marks, zorder=3 + front / 10, **marker
    )
    if one.low is not None and one.high is not None:
        low, high = _in_unit(one.low, scales[1]), _in_unit(one.high, scales[1])
        canvas.axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)


def _ends(series: Sequence[Series], scales: tuple[Scale, Scale]) -> list[tuple[float, float]]:
    """Last point of each, as drawn."""
    return [(a / scales[0].one, b / scales[1].one) for a, b in (_last(one) or (0.0, 0.0) for one in series)]


def _name_ends(canvas: Canvas, shown: Sequence[Series], scales: tuple[Scale, Scale]) -> None:
    """Write names to the right of the axes, apart from each other, each tied to the end of its line."""
    axes = canvas.axes
    names = [fold(one.name, 13 if canvas.narrow else 24) for one in shown]
    texts = [write_text(canvas, name, (1, 0.5), (15, 0), xycoords="axes fraction", va="center") for name in names]
    # px are known only once the layout is fixed; what is added later must not change it
    canvas.fix_layout_()
    box = axes.get_window_extent()
    heights = [text.get_window_extent().height + 3 for text in texts]
    pixels = [axes.transData.transform(end) for end in _ends(shown, scales)]
    spots = spread([pixel[1] for pixel in pixels], heights, low=box.y0 - 8, high=box.y1 + 8)
    for one, text, pixel, spot in zip(shown, texts, pixels, spots, strict=True):
        text.xy = (1, (spot - box.y0) / box.height)
        across = [(pixel[0] - box.x0) / box.width, 1 + 4 / box.width, 1 + 12 / box.width]
        upward = [(height - box.y0) / box.height for height in (pixel[1], pixel[1], spot)]
        if across[0] > 0.97:
            across, upward = across[1:], upward[1:]
        stroke = (0, (1, 1.5)) if len(across) == 3 else "-"
        look: dict[str, Any] = {"color": canvas.colour(one.role), "linewidth": 0.9, "linestyle": stroke}
        fixed: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "scalex": False, "scaley": False}
        axes.plot(across, upward, **look, **fixed)[0].set_in_layout(False)


def _name_points(
    canvas: Canvas, named: Sequence[Series], scales: tuple[Scale, Scale], *, around: Sequence[Series]
) -> None:
    """Write each name beside its last point, where it covers least."""
    if not named:
        return
    axes = canvas.axes
    ends, texts = _ends(named, scales), []
    for one, end in zip(named, ends, strict=True):
        name = fold(one.name, (15 if canvas.narrow else 26) + 10 * bool(one.source))
        text = write_text(canvas, name, end, (0, 0), va="bottom", zorder=5)
        text.set_in_layout(False)
        texts.append(text)
    canvas.fix_layout_()
    box = axes.get_window_extent()
    sizes = [(extent.width, extent.height) for extent in (text.get_window_extent() for text in texts)]
    pixels = [tuple(axes.transData.transform(end)) for end in ends]
    room = (box.x0, box.y0, canvas.width - 4, box.y1)
    covered = [spot for one in around for spot in _covered(canvas, one, scales)]
    spots = place(pixels, sizes, room=room, gap=7, obstacles=covered)
    for text, pixel, spot in zip(texts, pixels, spots, strict=True):
        text.set_position((spot[0] - pixel[0], spot[1] - pixel[1]))


def _covered(canvas: Canvas, one: Series, scales: tuple[Scale, Scale]) -> list[Box]:
    """Small boxes along a series in px, where no name should lie."""
    points = [
        canvas.axes.transData.transform((a / scales[0].one, b / scales[1].one))
        for a, b in zip(one.x, one.y, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    # the lines between points, in steps of 8 px: a name must not lie on a line either
    path = [points[0]]
    for start, end in itertools.pairwise(points):
        steps = max(1, math.ceil(math.dist(start, end) / 8)) if not one.source else 1
        path += [start + (end - start) * (at + 1) / steps for at in range(steps)]
    return [(x - 4, y - 4, x + 4, y + 4) for x, y in path]


def with_spread(caption: str, shown: Sequence[Series], between: str) -> str:
    """Say what the band is and how many runs stand behind it."""
    counts = sorted({one.n for one in shown if one.low is not None and one.n is not None})
    if not any(one.low is not None for one in shown):
        return caption
    runs = f", n = {' and '.join(map(str, counts))}" if counts else ""
    return f"{caption} Spread: {between}{runs}.".strip()
