"""A picture as a value: drawn on request for a light or dark ground or both, for a column or a phone, as SVG or PNG."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.report.atomic import write_whole
from sparing.report.palette import Ground, Inks, Role, Theme, Themes, adapted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# the font stack of pages and pictures: what the reader's system has
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_STYLE = Path(__file__).with_name("style.mplstyle")
WIDE, NARROW = 640.0, 343.0  # px: the column of a page; a phone of 375 px less its margins


@dataclass(frozen=True, slots=True)
class Canvas:
    """What a plot draws on."""

    drawing: Drawing
    axes: Axes
    inks: Inks
    narrow: bool

    @property
    def ground(self) -> Ground:
        """Colours of text, rules and paper."""
        return self.inks.ground

    def colour(self, role: Role) -> str:
        """Colour of a role on this ground."""
        return self.inks.of(role)

    @property
    def width(self) -> float:
        """Width in px."""
        return NARROW if self.narrow else WIDE

    def fix_layout_(self) -> None:
        """Arrange axes and labels now and for good, so that places in px can be read and kept."""
        if self.drawing.get_layout_engine() is not None:
            self.drawing.draw_without_rendering()
            self.drawing.set_layout_engine("none")


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its finding as title, a text for those who cannot see it, and a caption."""

    title: str
    """The finding, in words."""

    alt: str
    """What the picture shows, in words."""

    caption: str
    """What band, markers and hatches mean, and n; may be empty."""

    draw: Callable[[Canvas], None] = field(repr=False, compare=False)
    """Draws the plot without its title."""

    heights: tuple[float, float] = field(default=(340.0, 300.0), repr=False)
    """Height in px on a page and on a phone."""

    @property
    def svg_light(self) -> str:
        """SVG for a light ground, 640 px wide, text as text, background clear."""
        return self.svg("light")

    @property
    def svg_dark(self) -> str:
        """SVG for a dark ground, 640 px wide, text as text, background clear."""
        return self.svg("dark")

    def svg(self, theme: Themes = "light", *, narrow: bool = False) -> str:
        """Draw as an SVG element; the same picture gives the same text, and no two pictures share an id.

        Args:
            theme: Ground it will stand on; for both, its colours follow what the reader's system prefers.
            narrow: Whether for a phone (343 px) instead of a column (640 px).

        Returns:
            ``<svg …>…</svg>`` without prolog, dates or fixed size.
        """
        # ids are made of the content, so the same picture is the same text and two pictures on a page never clash
        key = hashlib.sha256(repr((self.title, self.alt, self.caption, theme, narrow)).encode()).hexdigest()[:8]
        inks = Inks(theme)
        return adapted(scoped(_svg_element(self._saved("svg", inks, narrow=narrow)), f"p{key}"), inks.pairs)

    def save_svg(self, path: str | PathLike[str], *, theme: Theme = "light") -> Path:
        """Write a stand-alone SVG with its title and an opaque ground.

        Args:
            path: Target.
            theme: Light or dark ground.

        Returns:
            The target.
        """
        return write_whole(path, _portable(self._saved("svg", Inks(theme), titled=True).decode()))

    def save_png(self, path: str | PathLike[str], *, theme: Theme = "light", narrow: bool = False) -> Path:
        """Write a PNG at twice the size of the page (1280 px wide) with its title.

        Args:
            path: Target.
            theme: Light or dark ground.
            narrow: Whether as on a phone.

        Returns:
            The target.
        """
        return write_whole(path, self._saved("png", Inks(theme), narrow=narrow, titled=True))

    def _saved(self, kind: str, inks: Inks, *, narrow: bool = False, titled: bool = False) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure as Drawing

        with matplotlib.rc_context(rc=_colours(inks.ground), fname=_STYLE):
            drawing = Drawing(figsize=self._size(narrow=narrow, titled=titled))
            canvas = Canvas(drawing, drawing.add_subplot(), inks, narrow)
            if titled:
                _headline(canvas, self.title)
            self.draw(canvas)
            out = io.BytesIO()
            metadata = {"Software": None} if kind == "png" else None  # an SVG loses all of it in ``_portable``
            clear = kind == "svg" and not titled
            drawing.savefig(out, format=kind, dpi=144, metadata=metadata, transparent=clear)
        return out.getvalue()

    def _size(self, *, narrow: bool, titled: bool) -> tuple[float, float]:
        extra = 18.0 * (_wrapped(self.title, narrow=narrow).count("\n") + 1) + 14 if titled else 0.0
        return (NARROW if narrow else WIDE) / 72, (self.heights[narrow] + extra) / 72


def _wrapped(text: str, *, narrow: bool) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, 42 if narrow else 76))


def _headline(canvas: Canvas, title: str) -> None:
    """Write the finding above the plot, from its left edge."""
    text = _wrapped(title, narrow=canvas.narrow)
    canvas.drawing.suptitle(text, x=0.012, ha="left", fontsize=13, fontweight="bold", color=canvas.ground.ink)


def _colours(shade: Ground) -> dict[Any, Any]:
    quiet = ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "axes.titlecolor")
    rules = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {"text.color": shade.ink} | {
        name: colour
        for names, colour in ((quiet, shade.quiet), (rules, shade.rule), (papers, shade.paper))
        for name in names
    }


def _portable(svg: str) -> str:
    """Use the reader's fonts and drop the empty metadata."""
    svg = re.sub(r"'DejaVu Sans'(?:, *[^;\"]*)?(?=[;\"])", FONTS, svg)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _svg_element(saved: bytes) -> str:
    """Cut the element out of the document and free its size, so that the page decides it."""
    text = _portable(saved.decode())
    text = text[text.index("<svg") :].strip()
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height|version|xmlns:xlink|xmlns)="[^"]*"', "", head)
    return f'{head} xmlns="http://www.w3.org/2000/svg" aria-hidden="true">{rest}'.replace("xlink:href=", "href=")


def scoped(svg: str, prefix: str) -> str:
    """Put a prefix before every id of an SVG and every reference to one, so that many fit one page.

    Example:
        >>> scoped('<g id="a"/><use href="#a" clip-path="url(#b)"/>', "p1")
        '<g id="p1-a"/><use href="#p1-a" clip-path="url(#p1-b)"/>'
    """
    return re.sub(r'((?<![\w-])id="|href="#|url\(#)', lambda match: f"{match.group(1)}{prefix}-", svg)
