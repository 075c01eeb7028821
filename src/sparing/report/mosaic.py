"""Small images in rows and columns: one row for each method or moment, one column for each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparing.errors import UserError
from sparing.report.cells import fold
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

    def height(*, narrow: bool) -> float:
        step = _tile(count, narrow=narrow) + (_LINE + 6 if narrow else 0)
        return 2 * _MARGIN + (_HEAD if columns else 0) + len(names) * step

    def draw(canvas: Canvas) -> None:
        # places are in px from the lower left; axes fill the drawing and are measured in px
        axes, narrow, tile = canvas.axes, canvas.narrow, _tile(count, narrow=canvas.narrow)
        canvas.drawing.set_layout_engine("none")
        wide, high = (72 * side for side in canvas.drawing.get_size_inches())
        axes.set_position((0, 0, 1, 1))
        axes.set(xlim=(0, wide), ylim=(0, high))
        axes.set_axis_off()
        step, left = tile + (_LINE + 6 if narrow else 0), _MARGIN + (0 if narrow else _NAME)
        top, gap = _MARGIN + len(names) * step, max(1.0, tile * 0.04)
        for row, name in enumerate(names):
            bottom = top - row * step - step
            low = bottom + gap
            for column, image in enumerate(pixels[row]):
                start = left + column * tile
                edges = (start, start + tile - gap, low, low + tile - gap)
                # each pixel a sharp square: matplotlib's default smooths what is enlarged less than threefold
                axes.imshow(image, extent=edges, interpolation="nearest", aspect="auto", origin="upper")
            look: dict[str, Any] = {"color": canvas.shades.ink, "ha": "left", "va": "bottom" if narrow else "center"}
            place = (left, bottom + tile + 3, name) if narrow else (_MARGIN, bottom + tile / 2, fold(name, 17))
            axes.text(*place, **look)
        size = min(12.0, 1.7 * tile / max(map(len, columns), default=1))
        for column, name in enumerate(columns):
            look = {"ha": "center", "va": "bottom", "color": canvas.shades.quiet, "fontsize": size}
            axes.text(left + (column + 0.5) * tile, top + 4, name, **look)

    words = f"Grid of small images, {count} in each row: {', '.join(names)}."
    return Figure(title, alt or words, caption, draw, (height(narrow=False), height(narrow=True)))


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
