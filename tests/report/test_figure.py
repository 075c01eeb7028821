"""A picture is a value: the same text every time, no shared ids, no trace in matplotlib's state."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from sparing.report.figure import Figure, prefix_ids
from sparing.report.palette import Palette
from sparing.report.plots import Bar, Series, bars, heatmap, lines

HOSTILE = 'a & <b> "c" $x_1$ --> <script>'


@pytest.fixture(scope="module")
def figure() -> Figure:
    return lines([Series(HOSTILE, [0, 1, 2], [3, 2, 1], "reference")], title="Loss falls", x="step", y="loss")


@pytest.fixture(scope="module")
def drawings(figure) -> dict[str, str]:
    kinds = itertools.product(("light", "dark", "both"), (False, True))
    return {f"{theme} {narrow}": figure.svg(theme, narrow=narrow) for theme, narrow in kinds}


def test_the_same_picture_gives_the_same_text(figure, drawings) -> None:
    assert figure.svg_light == drawings["light False"]
    assert figure.svg_dark == drawings["dark False"]


def test_it_is_well_formed_names_are_escaped_and_nothing_is_dated_signed_or_fetched(drawings) -> None:
    for svg in drawings.values():
        root = ET.fromstring(svg)
        words = "".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
        assert HOSTILE.replace(" ", "") in words.replace(" ", "")
        assert "<script" not in svg
        assert "metadata" not in svg
        assert "matplotlib.org" not in svg
        assert not re.search(r'(?:href|src)="(?!#|data:)', svg)
        assert "DOCTYPE" not in svg


def test_ids_of_all_drawings_differ_and_every_reference_is_met(drawings) -> None:
    others = (
        heatmap([[0.1, 0.2]], title="M", x="x", y="y", kind="sequential"),
        bars([Bar("a", 1)], title="B", value="v"),
    )
    everything = [*drawings.values(), *(other.svg() for other in others)]
    ids = [name for svg in everything for name in re.findall(r'(?<![\w-])id="([^"]+)"', svg)]
    assert len(ids) == len(set(ids))
    for svg in everything:
        own = set(re.findall(r'(?<![\w-])id="([^"]+)"', svg))
        used = set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg))
        assert used <= own


def test_the_page_decides_the_size(drawings) -> None:
    for name, svg in drawings.items():
        root = ET.fromstring(svg)
        assert "width" not in root.attrib
        width = float(root.attrib["viewBox"].split()[2])
        assert width == pytest.approx(343 if name.endswith("True") else 640)


def test_the_reference_is_black_on_light_and_white_on_dark(drawings) -> None:
    assert "stroke: #000000" in drawings["light False"]
    assert "stroke: #ffffff" in drawings["dark False"]
    assert Palette("dark").shades.ink in drawings["dark False"]


def test_a_drawing_for_both_grounds_is_each_of_them(figure, drawings) -> None:
    """Variables put in by hand as light or dark give that drawing, but for the ids, which tell drawings apart."""
    both = drawings["both False"]
    style = both[both.index("<style>") : both.index("</style>") + len("</style>")]
    light, dark = style.split("@media screen and (prefers-color-scheme:dark)")
    for theme, rules in (("light", light), ("dark", dark)):
        values = dict(re.findall(r"(--c[0-9a-f]{6}-[0-9a-f]{6}):(#\w{6})", rules))
        made = re.sub(r"var\((--[\w-]+)\)", lambda match, values=values: values[match[1]], both.replace(style, ""))
        assert nameless(made) == nameless(drawings[f"{theme} False"])
    assert "#01f" not in both


def nameless(svg: str) -> str:
    """Without what differs by design: ids, which are hashes, the case of colours, and black, which matplotlib omits."""
    return re.sub(r"p[0-9a-f]{8}-[\w.]+|fill: #000000; ", "", svg).lower()


def test_text_stays_text_in_the_readers_fonts(drawings) -> None:
    svg = drawings["light False"]
    assert "system-ui" in svg
    assert "DejaVu" not in svg
    assert ">step</text>" in svg


def test_matplotlib_is_left_as_it_was(figure) -> None:
    before = dict(matplotlib.rcParams)
    figure.svg("dark")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize(("theme", "narrow", "width"), [("light", False, 1280), ("dark", True, 686)])
def test_a_png_is_twice_as_wide_as_the_page(figure, tmp_path: Path, theme, narrow, width) -> None:
    with Image.open(figure.save_png(tmp_path / "p.png", theme=theme, narrow=narrow)) as picture:
        assert abs(picture.width - width) <= 1  # matplotlib truncates to whole pixels
        corner = "#{:02x}{:02x}{:02x}".format(*picture.convert("RGB").getpixel((0, 0)))
    assert corner == Palette(theme).shades.paper


def test_a_stand_alone_svg_has_title_and_ground(figure, tmp_path: Path) -> None:
    text = figure.save_svg(tmp_path / "p.svg").read_text()
    assert text.startswith("<?xml")
    assert "Loss falls" in text
    assert Palette("light").shades.paper in text


def test_scoping_leaves_other_words_alone() -> None:
    assert prefix_ids('<g data-id="a" id="b" href="#b"/>', "p") == '<g data-id="a" id="p-b" href="#p-b"/>'
