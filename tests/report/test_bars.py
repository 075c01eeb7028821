"""Bars are as long as their values; parts add up to totals; predicted is hatched."""

from __future__ import annotations

import itertools
import math

import pytest

from sparing.errors import UserError
from sparing.report.bars import category_colours
from sparing.report.figure import Figure
from sparing.report.palette import Palette, contrast
from sparing.report.plots import Axis, Bar, Stack, bars, stacked_bars, style

GIB = 2**30
PARTS = {"params": 1.0 * GIB, "grads": 0.5 * GIB, "optimizer": 2.0 * GIB}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_lengths_colours_and_numbers(drawn) -> None:
    shown = [Bar("full", 4.0 * GIB, "reference"), Bar("lisa", 1.0 * GIB, "ours"), Bar("lora", None, "rival")]
    figure = bars(shown, title="T", value=Axis("peak", "B"))
    axes = drawn(figure).axes
    assert [patch.get_width() for patch in axes.patches] == [4, 1, 0]
    assert texts(axes) == ["full", "4.00 GiB", "lisa", "1.00 GiB", "lora", "–"]
    assert figure.alt == "Bars of peak: full 4.00 GiB; lisa 1.00 GiB; lora –."
    assert axes.get_xlabel() == "peak (GiB)"


def test_an_interval_is_drawn_and_written(drawn) -> None:
    figure = bars(
        [Bar("lisa", 1.41, low=1.36, high=1.45, n=7)], title="T", value=Axis("speed", "×"), mark=(1.0, "full")
    )
    axes = drawn(figure).axes
    assert texts(axes) == ["lisa", "1.41× [1.36, 1.45]", "full"]
    assert all(line.get_segments()[0][:, 0] == pytest.approx([1.36, 1.45]) for line in axes.collections)
    assert figure.caption == "Spread: the interval in brackets, n = 7."
    assert axes.lines[-1].get_xdata() == pytest.approx([1.0, 1.0])


def test_what_lies_below_zero_is_shown_and_zero_marked(drawn) -> None:
    shown = [Bar("galore", 0.3, low=-2.7, high=3.4, n=8), Bar("lisa", -4.0)]
    axes = drawn(bars(shown, title="T", value=Axis("loss", "nat"))).axes
    assert axes.get_xlim()[0] == pytest.approx(-4.0)
    assert axes.get_xlim()[1] > 3.4
    assert axes.lines[-1].get_xdata() == pytest.approx([0.0, 0.0])
    assert drawn(bars([Bar("a", 1.0)], title="T", value=Axis("loss", "nat"))).axes.get_xlim()[0] == 0


def test_a_published_value_is_an_open_bar(drawn) -> None:
    own, published = drawn(bars([Bar("a", 1.0), Bar("a", 2.9, source="Fig. 2")], title="T", value="x")).axes.patches
    assert own.get_facecolor()[3] == 1
    assert published.get_facecolor()[3] == 0


def test_bars_of_one_plot_do_not_touch(drawn) -> None:
    patches = drawn(bars([Bar(str(at), at) for at in range(5)], title="T", value="x")).axes.patches
    edges = sorted((patch.get_y(), patch.get_y() + patch.get_height()) for patch in patches)
    assert all(above[0] > below[1] for below, above in itertools.pairwise(edges))


@pytest.mark.parametrize("narrow", [False, True])
def test_the_number_beside_the_longest_bar_fits(narrow) -> None:
    figure = bars([Bar("a", 1e9, low=0.9e9, high=1.2e9)], title="T", value=Axis("peak", "B"))
    seen = []

    def spy(canvas) -> None:
        figure.draw(canvas)
        canvas.drawing.draw_without_rendering()
        seen.append((canvas.axes.texts[1].get_window_extent().x1, canvas.drawing.bbox.x1))

    Figure("T", "", "", spy, figure.heights).svg(narrow=narrow)
    assert seen[0][0] <= seen[0][1]


def test_parts_are_stacked_end_to_end(drawn) -> None:
    axes = drawn(stacked_bars([Stack("full", PARTS)], title="T", value=Axis("peak", "B"))).axes
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]
    assert spans == [(0, 1), (1, 1.5), (1.5, 3.5)]
    assert texts(axes) == ["full", "3.50 GiB"]


def test_predicted_stands_hatched_beside_measured_under_one_name(drawn) -> None:
    pair = [Stack("full", PARTS, "predicted"), Stack("full", PARTS, "measured"), Stack("lisa", PARTS, "measured")]
    axes = drawn(stacked_bars(pair, title="T", value=Axis("peak", "B"))).axes
    assert texts(axes) == ["full", "predicted 3.50 GiB", "measured 3.50 GiB", "lisa", "measured 3.50 GiB"]
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [True] * 3 + [False] * 6
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["params", "grads", "optimizer", "predicted"]


@pytest.mark.parametrize("narrow", [False, True])
def test_a_key_of_many_categories_stays_in_the_picture_and_off_the_bars(narrow) -> None:
    stack = Stack("a", {f"category number {at}": 1.0 for at in range(9)}, "predicted")
    figure = stacked_bars([stack], title="T", value="v", mark=(4.0, "limit"))
    seen = []

    def spy(canvas) -> None:
        figure.draw(canvas)
        canvas.drawing.draw_without_rendering()
        axes = canvas.axes
        seen.extend([axes.get_legend().get_window_extent(), axes.get_window_extent(), canvas.drawing.bbox])
        seen.append(axes.texts[-1].get_window_extent())

    Figure("T", "", "", spy, figure.heights).svg(narrow=narrow)
    key, bars_box, paper, mark = seen
    assert key.x1 <= paper.x1
    assert key.y1 <= paper.y1
    assert key.y0 >= mark.y1 >= bars_box.y1
    assert bars_box.height > 30  # the one bar keeps its room


def test_a_part_that_only_some_have_keeps_its_colour(drawn) -> None:
    axes = drawn(stacked_bars([Stack("a", {"x": 1, "y": 1}), Stack("b", {"y": 1})], title="T", value="v")).axes
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert colours[1] == colours[2] != colours[0]


def test_the_words_name_every_part() -> None:
    figure = stacked_bars([Stack("full", PARTS, "predicted")], title="T", value=Axis("peak", "B"))
    assert figure.alt == (
        "Stacked bars of peak: full predicted 3.50 GiB (params 1.00 GiB, grads 512 MiB, optimizer 2.00 GiB)."
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_categories_differ_from_each_other_and_dark_ones_from_dark_paper(theme, count) -> None:
    palette = Palette(theme)
    colours = category_colours(count, palette)
    assert len(set(colours)) == count
    assert contrast(colours[0], palette.shades.paper) >= 1.9  # the palest step is told by its neighbours and the key


def test_nothing_to_draw_is_an_error() -> None:
    for plot in (bars, stacked_bars):
        with pytest.raises(UserError, match="nothing to draw"):
            plot([], title="T", value="x")


def test_zero_and_nan_have_no_length(drawn) -> None:
    axes = drawn(bars([Bar("a", 0.0), Bar("b", math.nan)], title="T", value="x")).axes
    assert [patch.get_width() for patch in axes.patches] == [0, 0]
    assert texts(axes)[3] == "NaN"
    assert style("ours").colour == "#0072B2"
