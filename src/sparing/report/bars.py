"""Bars that lie level, each under its name and beside its value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparing.errors import UserError
from sparing.report.axes import Mark, dress, reference_line, write_text
from sparing.report.cells import Scale, format_number, words
from sparing.report.curves import with_spread
from sparing.report.figure import NARROW, WIDE, Canvas, Figure
from sparing.report.palette import Palette, Role
from sparing.report.series import Axis, Series, as_axis

Ends = tuple[float, float]  # the least and the most that the axis holds, in the unit that is shown
_BAR, _GAP, _NAME, _APART = 16.0, 3.0, 20.0, 11.0  # px: a bar, below it, a name, below a group


@dataclass(frozen=True, slots=True)
class Bar:
    """One value of one method."""

    label: str
    """Name, written above the bar."""

    value: float | None
    """Length, in the unit of the axis; None is not measured."""

    role: Role = "ours"
    """Role of the method: its colour."""

    low: float | None = None
    """Lower end of the interval."""

    high: float | None = None
    """Upper end of the interval."""

    n: int | None = None
    """Runs behind the value (count)."""

    source: str = ""
    """Where a published value comes from: it is drawn as an open bar."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One value made of parts; stacks of the same label that follow each other stand together."""

    label: str
    """Name of the group."""

    parts: Mapping[str, float]
    """Size by category, in the unit of the axis."""

    kind: Literal["predicted", "measured", ""] = ""
    """Predicted is hatched, measured is solid."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return math.fsum(self.parts.values())


def bars(
    bars: Sequence[Bar], *, title: str, value: Axis | str, mark: Mark | None = None, caption: str = "", alt: str = ""
) -> Figure:
    """Draw one bar per value, with its number at the end.

    Args:
        bars: What to draw, from the top.
        title: The finding, in words.
        value: Quantity and unit.
        mark: A value to draw a line at, and its name.
        caption: More to say under the picture.
        alt: What it shows, in words; composed from the values by default.

    Returns:
        The picture.

    Raises:
        UserError: If there is no bar.
    """
    axis, scale = as_axis(value), _scale((end for bar in bars for end in (bar.value, bar.high)), as_axis(value))
    texts = [format_number(bar.value, axis.unit, low=bar.low, high=bar.high) for bar in bars]

    def draw(canvas: Canvas) -> None:
        at, ends = 0.0, _ends((end for bar in bars for end in (bar.value, bar.low, bar.high)), mark, scale)
        for bar, text in zip(bars, texts, strict=True):
            _named(canvas, f"{bar.label} ({bar.source})" if bar.source else bar.label, at)
            _one_bar(canvas, bar, at + _NAME, scale, text)
            at += _NAME + _BAR + _APART
        _finish(canvas, axis, scale, ends, at, [len(text) for text in texts])
        reference_line(canvas, mark, scale)

    described = "; ".join(f"{bar.label} {text}" for bar, text in zip(bars, texts, strict=True))
    height = len(bars) * (_NAME + _BAR + _APART) + 52 + (16 if mark else 0)
    spreads = [Series(bar.label, [0], [0], low=[0], n=bar.n) for bar in bars if bar.low is not None]
    note = with_spread(caption, spreads, "the interval in brackets")
    return Figure(title, alt or f"Bars of {axis.label}: {described}.", note, draw, (height, height))


def stacked_bars(
    stacks: Sequence[Stack], *, title: str, value: Axis | str, mark: Mark | None = None, caption: str = "",
    alt: str = "",
) -> Figure:  # fmt: skip
    """Draw totals made of parts, predicted (hatched) beside measured (solid).

    Args:
        stacks: What to draw, from the top; the same label in a row makes a group.
        title: The finding, in words.
        value: Quantity and unit.
        mark: A value to draw a line at, such as the memory of a card, and its name.
        caption: More to say under the picture.
        alt: What it shows, in words; composed from the parts by default.

    Returns:
        The picture.

    Raises:
        UserError: If there is no stack.
    """
    axis, scale = as_axis(value), _scale((stack.total for stack in stacks), as_axis(value))
    texts = [f"{stack.kind} {format_number(stack.total, axis.unit)}".strip() for stack in stacks]
    categories = list(dict.fromkeys(part for stack in stacks for part in stack.parts))
    pairs = zip(stacks, texts, strict=True)
    groups = [list(group) for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].label)]

    def draw(canvas: Canvas) -> None:
        colours = dict(zip(categories, category_colours(len(categories), canvas.palette), strict=True))
        at = 0.0
        for group in groups:
            _named(canvas, group[0][0].label, at)
            at += _NAME
            for stack, text in group:
                _one_stack(canvas, stack, at, scale, colours, text)
                at += _BAR + _GAP
            at += _APART - _GAP
        ends = _ends((stack.total for stack in stacks), mark, scale)
        _finish(canvas, axis, scale, ends, at, [len(text) for text in texts])
        reference_line(canvas, mark, scale)
        _key(canvas, colours, hatched=any(stack.kind == "predicted" for stack in stacks), lift=26 if mark else 8)

    described = []
    for stack, text in zip(stacks, texts, strict=True):
        parts = ", ".join(f"{words(part)} {format_number(size, axis.unit)}" for part, size in stack.parts.items())
        described.append(f"{stack.label} {text} ({parts})")
    names = [*map(words, categories), "predicted"]
    height = len(groups) * (_NAME + _APART) + len(stacks) * (_BAR + _GAP) + (74 if mark else 56)
    wide, narrow = (height + 20 * _key_shape(names, width)[1] for width in (WIDE, NARROW))
    return Figure(title, alt or f"Stacked bars of {axis.label}: {'; '.join(described)}.", caption, draw, (wide, narrow))


def category_colours(count: int, palette: Palette) -> list[str]:
    """Colours of categories that are not methods: steps of viridis that stand off the background."""
    import matplotlib
    from matplotlib.colors import to_hex

    viridis, shares = matplotlib.colormaps["viridis"], [at / max(1, count - 1) for at in range(count)]
    steps = [(0.87 * share, 0.24 + (1.0 - 0.24) * share) for share in shares]
    return [palette.either(to_hex(viridis(light)), to_hex(viridis(dark))) for light, dark in steps]


def _scale(values: Iterable[object], axis: Axis) -> Scale:
    found = list(values)
    if not found:
        raise UserError("plot", got="no bar", why="there is nothing to draw", do="give at least one value")
    return axis.scaled(found)


def _ends(values: Iterable[float | None], mark: Mark | None, scale: Scale) -> Ends:
    """From where to where bars, their intervals and the mark reach; zero is always inside."""
    sizes = [value / scale.one for value in values if value is not None and math.isfinite(value)]
    sizes += [0.0, mark[0] / scale.one if mark else 0.0]
    least, most = min(sizes), max(sizes)
    return least, most if most > least else 1.0


def _named(canvas: Canvas, name: str, at: float) -> None:
    letters = int(canvas.width / 7.6)
    text = canvas.axes.annotate(
        name if len(name) <= letters else f"{name[: letters - 1]}…", (0, at + _NAME - 6), va="baseline", zorder=4,
        xycoords=("axes fraction", "data"), color=canvas.shades.ink, annotation_clip=False, bbox=_screen(canvas),
    )  # fmt: skip
    # a long name must not squeeze the axes in which it lies
    text.set_in_layout(False)


def _screen(canvas: Canvas) -> dict[str, Any]:
    """Paper behind a text, so that no line crosses it."""
    return {"facecolor": canvas.shades.paper, "edgecolor": "none", "pad": 1}


def _write_value(canvas: Canvas, text: str, end: float, at: float) -> None:
    place, how = (end, at + _BAR / 2), {"annotation_clip": False, "bbox": _screen(canvas), "zorder": 4}
    write_text(canvas, text, place, (6, 0), va="center", **how)


def _one_bar(canvas: Canvas, bar: Bar, at: float, scale: Scale, text: str) -> None:
    # a value that was not measured has a bar of no length and a dash for its number
    axes, colour, centre = canvas.axes, canvas.colour(bar.role), at + _BAR / 2
    value = bar.value if bar.value is not None and math.isfinite(bar.value) else 0.0
    filled: dict[str, Any] = (
        {"facecolor": "none", "edgecolor": colour, "linewidth": 1.5} if bar.source else {"color": colour}
    )
    axes.barh(centre, value / scale.one, _BAR, zorder=2, **filled)
    end = max(value, 0.0)
    if bar.low is not None and bar.high is not None:
        end = max(end, bar.high)
        # a halo keeps the error bar readable on black
        for width, shade in ((3.6, canvas.shades.paper), (1.4, canvas.shades.ink)):
            axes.hlines(centre, bar.low / scale.one, bar.high / scale.one, color=shade, linewidth=width, zorder=3)
    _write_value(canvas, text, end / scale.one, at)


def _one_stack(canvas: Canvas, stack: Stack, at: float, scale: Scale, colours: Mapping[str, str], text: str) -> None:
    left, ends = 0.0, []
    for part, size in stack.parts.items():
        width = size / scale.one
        if stack.kind == "predicted":
            pale = canvas.palette.pale(colours[part], 0.25)
            look: dict[str, Any] = {"facecolor": pale, "edgecolor": colours[part], "hatch": "////", "linewidth": 0.0}
        else:
            look = {"facecolor": colours[part], "linewidth": 0.0}
        canvas.axes.barh(at + _BAR / 2, width, _BAR, left=left, zorder=2, **look)
        left += width
        ends.append(left)
    canvas.axes.vlines(ends, at, at + _BAR, color=canvas.shades.paper, linewidth=1.0, zorder=2.5)
    _write_value(canvas, text, left, at)


def _finish(canvas: Canvas, axis: Axis, scale: Scale, ends: Ends, height: float, letters: Sequence[int]) -> None:
    """Leave room for the values at the ends of the bars; show the axis below."""
    axes, (least, longest) = canvas.axes, ends
    room = min(0.55, (max(letters) * 7.4 + 16) / canvas.width)
    axes.set(xlim=(least, least + (longest - least) / (1 - room)), ylim=(height, 0))
    if least < 0:
        axes.axvline(0.0, color=canvas.shades.ink, linewidth=1.0, zorder=2.5)
    dress(canvas, Axis(axis.label, axis.unit, low=axis.low, high=axis.high), Axis(""), (scale, Scale(1, "")))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["bottom"].set_visible(False)


def _key(canvas: Canvas, colours: Mapping[str, str], *, hatched: bool, lift: float) -> None:
    """Name the categories ``lift`` px above the bars, and what the hatch means."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    patches = [Patch(facecolor=colour, label=words(part)) for part, colour in colours.items()]
    if hatched:
        quiet, pale = canvas.shades.quiet, canvas.palette.pale(canvas.shades.quiet, 0.2)
        patches.append(Patch(facecolor=pale, edgecolor=quiet, hatch="////", linewidth=0, label="predicted"))
    ncols, _ = _key_shape([str(patch.get_label()) for patch in patches], canvas.width)
    above = canvas.axes.transAxes + ScaledTranslation(0, lift / 72, canvas.drawing.dpi_scale_trans)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "bbox_transform": above}
    canvas.axes.legend(handles=patches, ncols=ncols, labelcolor=canvas.shades.ink, **place)


def _key_shape(names: Sequence[str], width: float) -> tuple[int, int]:
    """Columns and rows of a key that fits a width in px."""
    if sum(7.2 * len(name) + 32 for name in names) <= width:
        return len(names), 1
    columns = max(1, int(width / (6.8 * max(map(len, names)) + 32)))
    return columns, math.ceil(len(names) / columns)
