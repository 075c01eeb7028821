"""Small images in rows and columns: one row for each method or moment, one column for each class."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparing.errors import UserError
from sparing.report.figure import NARROW, WIDE, Canvas, Figure

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.float64]]

# A name and its images: arrays or tensors of values 0 (black) to 1, shape (height, width) or (height, width, 3)
Row = tuple[str, Sequence[Any]]

_MARGIN, _HEAD, _NAME, _LINE = 8.0, 20.0, 118.0, 15.0  # px: edges; column names; room for row names; one line of text


def images(rows: Sequence[Row], *, title: str, columns: Sequence[str] = (), caption: str = "", alt: str = "") -> Figure:
    """Draw a table of small images.

    Values below 0 and above 1 are shown as 0 and 1. On a desk the name of a row stands at its left, on a phone above.

    Args:
        rows: Name and images of each row, from the top.
        title: The finding, in words.
        columns: Name of each column; none by default.
        caption: More to say under the picture.
        alt: What it shows, in words; composed by default.

    Returns:
        The picture.

    Raises:
        UserError: If there is no image, rows differ in length, or images in shape.
    """
    names, pixels = [name for name, _ in rows], _stacked(rows)
    count = pixels.shape[1]
    if columns and len(columns) != count:
        do = "name each column once"
        raise UserError("columns", got=len(columns), why=f"there are {count} columns of images", do=do)

    def draw(canvas: Canvas) -> None:
        place = _Places(canvas, len(names), count, named=bool(columns))
        for row, name in enumerate(names):
            _paint(canvas, pixels[row], place, row)
            _write_name(canvas, name, place, row)
        size = min(12.0, 1.7 * place.tile / max(map(len, columns), default=1))
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "color": canvas.ground.quiet, "fontsize": size}
        for column, name in enumerate(columns):
            canvas.axes.text(place.left + (column + 0.5) * place.tile, place.top + 4, name, **style)

    words = f"Grid of small images, {count} in each row: {', '.join(names)}."
    named = bool(columns)
    heights = (
        _height(len(names), count, narrow=False, named=named),
        _height(len(names), count, narrow=True, named=named),
    )
    return Figure(title, alt or words, caption, draw, heights)


def _stacked(rows: Sequence[Row]) -> Pixels:
    """All images as one array (rows, columns, height, width, 3)."""
    import numpy as np

    shades = [[np.asarray(image, dtype=float) for image in images] for _, images in rows]
    shapes = {image.shape for row in shades for image in row}
    lengths = {len(row) for row in shades}
    if len(shapes) != 1 or len(lengths) != 1:
        got = f"{len(rows)} rows of lengths {sorted(lengths)} and {len(shapes)} shapes"
        raise UserError(
            "images", got=got, why="a grid needs images of one shape in rows of one length", do="give these"
        )
    shape = shapes.pop()
    if not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)):
        do = "give (height, width) or (height, width, 3)"
        raise UserError("images", got=f"shape {shape}", why="an image is grey or red, green, blue", do=do)
    stacked = np.clip(np.array(shades), 0, 1)
    return stacked if stacked.ndim == 5 else np.repeat(stacked[..., None], 3, axis=-1)


def _tile(count: int, *, narrow: bool) -> float:
    """Width of an image with its gap (px); few images are not blown up."""
    room = (NARROW if narrow else WIDE - _NAME) - 2 * _MARGIN
    return min(room / count, 64.0)


def _height(rows: int, count: int, *, narrow: bool, named: bool) -> float:
    each = _tile(count, narrow=narrow) + (_LINE + 6 if narrow else 0)
    return 2 * _MARGIN + (_HEAD if named else 0) + rows * each


class _Places:
    """Where things lie, in px from the lower left; axes fill the drawing and are measured in px."""

    def __init__(self, canvas: Canvas, rows: int, count: int, *, named: bool) -> None:
        """Measure, and make the axes ready."""
        self.tile = _tile(count, narrow=canvas.narrow)
        self.step = self.tile + (_LINE + 6 if canvas.narrow else 0)
        self.left = _MARGIN + (0 if canvas.narrow else _NAME)
        self.top = _MARGIN + rows * self.step
        canvas.drawing.set_layout_engine("none")
        width, height = (72 * side for side in canvas.drawing.get_size_inches())
        canvas.axes.set_position((0, 0, 1, 1))
        canvas.axes.set(xlim=(0, width), ylim=(0, height))
        canvas.axes.set_axis_off()

    def bottom(self, row: int) -> float:
        """Lower edge of a row of images."""
        return self.top - row * self.step - self.step


def _paint(canvas: Canvas, row: Pixels, place: _Places, at: int) -> None:
    """Draw the images of a row, each pixel a sharp square."""
    gap = max(1.0, place.tile * 0.04)
    low = place.bottom(at) + gap
    for column, image in enumerate(row):
        left = place.left + column * place.tile
        edges = (left, left + place.tile - gap, low, low + place.tile - gap)
        canvas.axes.imshow(image, extent=edges, interpolation="nearest", aspect="auto", origin="upper")
    canvas.axes.set_aspect("auto")


def _write_name(canvas: Canvas, name: str, place: _Places, at: int) -> None:
    """At the left of its row, folded; on a phone above it."""
    style: dict[str, Any] = {"color": canvas.ground.ink, "ha": "left"}
    if canvas.narrow:
        canvas.axes.text(place.left, place.bottom(at) + place.tile + 3, name, va="bottom", **style)
        return
    text = "\n".join(textwrap.wrap(name, 17, max_lines=3, placeholder="…"))
    canvas.axes.text(_MARGIN, place.bottom(at) + place.tile / 2, text, va="center", **style)
