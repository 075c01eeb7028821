"""Axes: few ticks, plain numbers or powers, quantity and unit, no frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparing.report.cells import Scale, fold, grouped, superscript
from sparing.report.figure import Canvas
from sparing.report.series import Axis

if TYPE_CHECKING:
    from matplotlib.axis import Axis as OneAxis
    from matplotlib.text import Annotation
    from matplotlib.ticker import Formatter

Mark = tuple[float, str]  # A value to draw a line at, and the words beside it


def tick_texts(values: Sequence[float], *, base: int = 10, log: bool = False) -> list[str]:
    """Write the ticks of one axis consistently: plain numbers with the same decimals, or all as powers.

    Example:
        >>> tick_texts([-0.5, 0.0, 0.5, 1.0]), tick_texts([0.0, 20000.0]), tick_texts([0.0, 5e6])
        (['−0.5', '0.0', '0.5', '1.0'], ['0', '20,000'], ['0', '5 M'])
        >>> tick_texts([1e-5, 1e-3], log=True), tick_texts([0.1, 1], log=True), tick_texts([2**-6, 2], base=2, log=True)
        (['10⁻⁵', '10⁻³'], ['0.1', '1'], ['2⁻⁶', '2¹'])
    """
    if log and base != 10:
        return [f"{base}{superscript(round(math.log(value, base)))}" for value in values]
    # matplotlib's zero tick may be off by rounding
    sizes = [abs(value) for value in values if abs(value) > 1e-300]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    if most >= 1e9 or most < 1e-3 or (log and (most > 1e5 or least < 9e-4)):
        return [_power(value) for value in values]
    factor, unit = (1e6, " M") if most >= 1e6 else (1.0, "")
    shown = [value / factor for value in values]
    decimals = max(len(f"{abs(value):.10g}".partition(".")[2]) for value in shown) if shown else 0
    texts = []
    for value in shown:
        places = len(f"{value:.10g}".partition(".")[2]) if log else decimals
        texts.append(f"{'−' if value < 0 else ''}{grouped(abs(value), places)}{unit if value else ''}")
    return texts


def _power(value: float) -> str:
    if abs(value) < 1e-300:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    factor = float(f"{abs(value) / 10.0**power:.6g}")
    return ("−" if value < 0 else "") + ("" if factor == 1 else f"{factor:g} × ") + f"10{superscript(power)}"


def dress(canvas: Canvas, x: Axis, y: Axis, scales: tuple[Scale, Scale]) -> None:
    """Set scales, ticks, limits and labels; the label of y stands level, above its axis."""
    axes = canvas.axes
    for axis, one, scale, name in ((axes.xaxis, x, scales[0], "x"), (axes.yaxis, y, scales[1], "y")):
        if one.log:
            getattr(axes, f"set_{name}scale")("log", base=_base(one))
        low, high = getattr(axes, f"get_{name}lim")()
        low, high = (now if end is None else end / scale.one for now, end in ((low, one.low), (high, one.high)))
        axes.set(**{f"{name}lim": (low, high)})
        _ticks(axis, one, narrow=canvas.narrow)
    axes.set_xlabel(fold(x.text(scales[0]), int(canvas.width / 9.8)), loc="right", multialignment="right")
    heading(canvas, y.text(scales[1]))


def heading(canvas: Canvas, text: str) -> None:
    """Write what the vertical direction means, above the axes from their left edge."""
    canvas.axes.set_title(fold(text, int(canvas.width / 8.2)), loc="left", pad=9)


def _base(axis: Axis) -> int:
    return 10 if axis.log is True else int(axis.log)


def _ticks(axis: OneAxis, one: Axis, *, narrow: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if one.log:
        base = _base(one)
        decades = math.log(high / low, base) if low > 0 else 1.0
        subs = (1.0, 2.0, 5.0) if base == 10 and decades < 1.7 else (1.0,)
        axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=5 if narrow else 8))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(tick_formatter(base=base, log=True))
        return
    axis.set_major_locator(MaxNLocator(nbins=4 if narrow else 6, steps=[1, 2, 2.5, 5, 10], integer=high - low > 20))
    axis.set_major_formatter(tick_formatter())


def tick_formatter(*, base: int = 10, log: bool = False) -> Formatter:
    """Make matplotlib write ticks with ``tick_texts``."""
    from matplotlib.ticker import Formatter

    class Ticks(Formatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return tick_texts([value], base=base, log=log)[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_texts([float(value) for value in values], base=base, log=log)

    return Ticks()


def write_text(
    canvas: Canvas, text: str, at: tuple[float, float], offset: tuple[float, float], **how: Any
) -> Annotation:
    """Write a text, in ink unless told otherwise, so many points from a place."""
    return canvas.axes.annotate(text, at, offset, textcoords="offset points", **{"color": canvas.shades.ink} | how)


def reference_line(canvas: Canvas, mark: Mark | None, scale: Scale) -> None:
    """Draw a named vertical line across bars, its words above it."""
    if mark is None:
        return
    at, text = mark[0] / scale.one, mark[1]
    axes = canvas.axes
    axes.axvline(at, color=canvas.shades.quiet, linewidth=1.2, dashes=(4, 2), zorder=3)
    low, high = axes.get_xlim()
    place = (at - low) / (high - low)
    side = "right" if place > 0.75 else "left" if place < 0.25 else "center"
    write_text(canvas, text, (at, 1), (0, 4), xycoords=("data", "axes fraction"), ha=side, color=canvas.shades.quiet)


def finite(values: Sequence[float]) -> list[float]:
    """Values that can be drawn."""
    return [value for value in values if math.isfinite(value)]
