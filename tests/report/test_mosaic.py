"""A grid of images shows every pixel of every image, names rows and columns, and refuses what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from sparing.errors import UserError
from sparing.report.mosaic import images
from sparing.report.plots import images as exported

GENERATOR = np.random.default_rng(0)
GREY = [GENERATOR.random((4, 4)) for _ in range(3)]
COLOUR = [GENERATOR.random((4, 4, 3)) for _ in range(3)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("row", [GREY, COLOUR], ids=["grey", "colour"])
def test_every_image_is_drawn_once_and_in_its_place(drawn, row, narrow: bool) -> None:
    figure = images([("first", row), ("second", row[::-1])], title="T", columns=["a", "b", "c"])
    axes = drawn(figure, narrow=narrow).axes
    found = sorted(axes.images, key=lambda image: (-image.get_extent()[2], image.get_extent()[0]))
    for image, given in zip(found, [*row, *row[::-1]], strict=True):
        shown = np.asarray(image.get_array())
        np.testing.assert_array_equal(shown, given if given.ndim == 3 else np.repeat(given[..., None], 3, -1))
    words = [text.get_text() for text in axes.texts]
    assert sorted(words) == ["a", "b", "c", "first", "second"]


@pytest.mark.parametrize("narrow", [False, True])
def test_images_do_not_overlap_and_lie_inside(drawn, narrow: bool) -> None:
    figure = images([("r", GREY)] * 3, title="T", columns=["a", "b", "c"])
    canvas = drawn(figure, narrow=narrow)
    boxes = [image.get_extent() for image in canvas.axes.images]
    for left, right, low, high in boxes:
        assert right > left
        assert high > low
        inside = [b for b in boxes if b[0] < right - 1e-9 and left < b[1] - 1e-9 and b[2] < high and low < b[3]]
        assert len(inside) == 1
    assert max(box[1] for box in boxes) <= canvas.width
    assert max(box[3] for box in boxes) <= figure.heights[narrow]
    assert min(box[2] for box in boxes) >= 0


def test_values_out_of_range_are_shown_as_black_and_white(drawn) -> None:
    axes = drawn(images([("r", [np.array([[-1.0, 2.0]])])], title="T")).axes
    np.testing.assert_array_equal(np.asarray(axes.images[0].get_array())[0, :, 0], [0, 1])


def test_it_is_told_in_words_and_drawn_for_both_grounds(tmp_path) -> None:
    figure = exported([("noise", GREY), ("end", GREY)], title="T", caption="C.")
    assert figure.alt == "Grid of small images, 3 in each row: noise, end."
    assert "<image" in figure.svg_light
    assert figure.svg_light != figure.svg_dark
    assert figure.save_png(tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("rows", "columns", "what"),
    [
        ([], (), "images"),
        ([("a", [])], (), "images"),
        ([("a", GREY), ("b", GREY[:2])], (), "images"),
        ([("a", [GREY[0], COLOUR[0]])], (), "images"),
        ([("a", [np.zeros((2, 2, 4))])], (), "red, green, blue"),
        ([("a", GREY)], ("only",), "columns"),
    ],
)
def test_what_is_no_grid_is_refused(rows, columns, what: str) -> None:
    with pytest.raises(UserError, match=what):
        images(rows, title="T", columns=columns)
