"""A picture as a value: drawn on request for light or dark backgrounds or both, column or phone, as SVG or PNG."""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.errors import require
from sparing.report.atomic import write_whole
from sparing.report.palette import Palette, Role, Shades, Theme, Themes, follow_theme

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
    palette: Palette
    narrow: bool

    @property
    def shades(self) -> Shades:
        """Colours of text, rules and paper."""
        return self.palette.shades

    def colour(self, role: Role) -> str:
        """Colour of a role on this background."""
        return self.palette.of(role)

    @property
    def width(self) -> float:
        """Width in px."""
        return NARROW if self.narrow else WIDE

    def fix_layout_(self) -> None:
        """Arrange axes and labels now and for good, so that places in px can be read and kept."""
        import matplotlib

        if (engine := self.drawing.get_layout_engine()) is not None:
            engine.execute(self.drawing)
            # truly none: for the placeholder that "none" leaves, matplotlib would draw everything twice when it saves
            with matplotlib.rc_context({"figure.constrained_layout.use": False}):
                self.drawing.set_layout_engine(None)


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

    def axes(self, axes: Axes | None = None, *, theme: Theme = "light") -> Axes:
        """Draw on matplotlib axes, for further work: annotate, save in another format, put beside another picture.

        Args:
            axes: Where to draw; by default those of a new figure of the size of a page. Pictures of several panels
                draw on a new figure only.
            theme: Light or dark background.

        Returns:
            The axes, of several panels the first; ``.figure`` is the matplotlib figure.

        Raises:
            UserError: If a picture of several panels is given axes.
        """
        import matplotlib
        from matplotlib.figure import Figure as Drawing

        palette = Palette(theme)
        with matplotlib.rc_context(rc=_colours(palette.shades), fname=_STYLE):
            drawing = Drawing(figsize=(WIDE / 72, self.heights[0] / 72)) if axes is None else axes.get_figure(root=True)
            assert drawing is not None
            target = drawing.add_subplot() if axes is None else axes
            self.draw(Canvas(drawing, target, palette, narrow=False))
        if target in drawing.axes:
            return target
        why, do = "it removes them to draw several panels", "call it without axes"
        require(axes is None, "axes", "axes for one panel", why, do)
        return drawing.axes[0]

    @property
    def svg_light(self) -> str:
        """SVG for a light background, 640 px wide, text as text, with a transparent background."""
        return self.svg("light")

    @property
    def svg_dark(self) -> str:
        """SVG for a dark background, 640 px wide, text as text, with a transparent background."""
        return self.svg("dark")

    def svg(self, theme: Themes = "light", *, narrow: bool = False) -> str:
        """Draw as an SVG element; the same picture gives the same text, and no two pictures share an id.

        Args:
            theme: Shades it will stand on; for both, its colours follow what the reader's system prefers.
            narrow: Whether for a phone (343 px) instead of a column (640 px).

        Returns:
            ``<svg …>…</svg>`` without prolog, dates or fixed size.
        """
        # ids are made of the content, so the same picture is the same text and two pictures on a page never clash
        key = hashlib.sha256(repr((self.title, self.alt, self.caption, theme, narrow)).encode()).hexdigest()[:8]
        palette = Palette(theme)
        text = _portable(self._saved("svg", palette, narrow=narrow))
        # cut out of its document and without a size, so that the page decides it
        head, rest = text[text.index("<svg") :].strip().split(">", 1)
        head = re.sub(r'\s(?:width|height|version|xmlns:xlink|xmlns)="[^"]*"', "", head)
        element = f'{head} xmlns="http://www.w3.org/2000/svg" aria-hidden="true">{rest}'
        return follow_theme(prefix_ids(element.replace("xlink:href=", "href="), f"p{key}"), palette.pairs)

    def save_svg(self, path: str | PathLike[str], *, theme: Theme = "light") -> Path:
        """Write a stand-alone SVG with its title and an opaque background.

        Args:
            path: Target.
            theme: Light or dark background.

        Returns:
            The target.
        """
        return write_whole(path, _portable(self._saved("svg", Palette(theme), titled=True)))

    def save_png(self, path: str | PathLike[str], *, theme: Theme = "light", narrow: bool = False) -> Path:
        """Write a PNG at twice the size of the page (1280 px wide) with its title.

        Args:
            path: Target.
            theme: Light or dark background.
            narrow: Whether as on a phone.

        Returns:
            The target.
        """
        return write_whole(path, self._saved("png", Palette(theme), narrow=narrow, titled=True))

    def _saved(self, kind: str, palette: Palette, *, narrow: bool = False, titled: bool = False) -> bytes:
        import matplotlib
        from matplotlib.figure import Figure as Drawing

        shades = palette.shades
        title = textwrap.wrap(self.title, 42 if narrow else 76)
        height = self.heights[narrow] + (18.0 * max(1, len(title)) + 14 if titled else 0.0)
        with matplotlib.rc_context(rc=_colours(shades), fname=_STYLE):
            # 72 points to an inch, as matplotlib writes SVG: one point is then one px of the page
            drawing = Drawing(figsize=((NARROW if narrow else WIDE) / 72, height / 72))
            canvas = Canvas(drawing, drawing.add_subplot(), palette, narrow)
            if titled:
                look: dict[str, Any] = {"ha": "left", "fontsize": 13, "fontweight": "bold", "color": shades.ink}
                drawing.suptitle("\n".join(title), x=0.012, **look)
            self.draw(canvas)
            out = io.BytesIO()
            # matplotlib would write its version, and another one other bytes; an SVG loses all of it in ``_portable``
            metadata = {"Software": None} if kind == "png" else None
            clear = kind == "svg" and not titled
            drawing.savefig(out, format=kind, dpi=144, metadata=metadata, transparent=clear)
        return out.getvalue()


def _colours(shade: Shades) -> dict[Any, Any]:
    quiet = ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "axes.titlecolor")
    rules = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {"text.color": shade.ink} | {
        name: colour
        for names, colour in ((quiet, shade.quiet), (rules, shade.rule), (papers, shade.paper))
        for name in names
    }


def _portable(saved: bytes) -> str:
    """Use the reader's fonts and drop the empty metadata."""
    svg = re.sub(r"'DejaVu Sans'(?:, *[^;\"]*)?(?=[;\"])", FONTS, saved.decode())
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def prefix_ids(svg: str, prefix: str) -> str:
    """Put a prefix before every id of an SVG and every reference to one, so that many fit one page.

    Example:
        >>> prefix_ids('<g id="a"/><use href="#a" clip-path="url(#b)"/>', "p1")
        '<g id="p1-a"/><use href="#p1-a" clip-path="url(#p1-b)"/>'
    """
    return re.sub(r'((?<![\w-])id="|href="#|url\(#)', lambda match: f"{match.group(1)}{prefix}-", svg)
