"""What the tests of the report room share: a canvas to draw on, and a stream that says it is a terminal."""

from __future__ import annotations

import io

import pytest

from sparing.report.figure import Canvas, Figure
from sparing.report.palette import Palette


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


@pytest.fixture
def drawn():
    """Draw a figure on bare matplotlib axes, to read back what was drawn."""
    from matplotlib.figure import Figure as Drawing

    def draw(figure: Figure, *, narrow: bool = False) -> Canvas:
        drawing = Drawing(figsize=(8, 5), dpi=72)
        canvas = Canvas(drawing, drawing.add_subplot(), Palette("light"), narrow)
        figure.draw(canvas)
        return canvas

    return draw
