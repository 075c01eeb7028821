"""Lines and points: what is drawn is what was given, each named once and legibly."""

from __future__ import annotations

import itertools
import math

import pytest

from sparing.errors import UserError
from sparing.report.figure import Figure
from sparing.report.plots import Axis, Series, lines, scatter, style

STEPS = list(range(0, 100, 5))


def four(spread: float = 0.01) -> list[Series]:
    roles = ("reference", "ours", "extension", "rival")
    names = ("full", "lisa", "lisa, embedding frozen", "lora, rank 8")
    return [
        Series(name, STEPS, [3.0 - step / 100 + rank * spread for step in STEPS], role)
        for rank, (name, role) in enumerate(zip(names, roles, strict=True))
    ]


def line_named(axes, colour: str):
    return next(line for line in axes.lines if line.get_color() == colour and len(line.get_xdata()) > 3)


def test_the_data_is_drawn_in_the_shown_unit(drawn) -> None:
    one = Series("a", [0, 60, 1200, 1800], [2**30, 2**31, 2**32, 2**31])
    axes = drawn(lines([one], title="T", x=Axis("t", "s"), y=Axis("m", "B"))).axes
    line = line_named(axes, style("ours").colour)
    assert list(line.get_xdata()) == pytest.approx([0, 1, 20, 30])  # minutes
    assert list(line.get_ydata()) == pytest.approx([1, 2, 4, 2])  # GiB


def test_each_role_has_its_colour_dash_and_end_marker(drawn) -> None:
    axes = drawn(lines(four(), title="T", x="step", y="loss")).axes
    for one in four():
        line = line_named(axes, style(one.role).colour)
        assert line.get_marker() == style(one.role).marker
        assert line.get_markevery() == [len(STEPS) - 1]
        assert line.is_dashed() == bool(style(one.role).dash)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("slope", [-0.01, 0.01])
def test_names_at_the_ends_do_not_overlap_and_stay_in_the_picture(narrow, slope) -> None:
    """Eight lines end within a hair of each other, at the lower or upper edge; measured in px after the layout."""
    shown = [Series(f"method {at}", STEPS, [slope * step + at * 1e-3 for step in STEPS]) for at in range(8)]
    figure = lines(shown, title="T", x="step", y="loss")
    boxes = []

    def spy(canvas) -> None:
        figure.draw(canvas)
        boxes.extend(text.get_window_extent() for text in canvas.axes.texts)
        boxes.append(canvas.drawing.bbox)

    Figure("T", "", "", spy, figure.heights).svg(narrow=narrow)
    *names, paper = boxes
    assert len(names) == 8
    for one, other in itertools.combinations(names, 2):
        assert not one.overlaps(other)
    for box in names:
        assert box.x1 <= paper.x1
        assert paper.y0 <= box.y0 <= box.y1 <= paper.y1


def test_a_spread_is_a_band_and_the_caption_says_what_and_how_many(drawn) -> None:
    one = Series("a", [0, 1, 2], [1, 2, 3], low=[0.5, 1, 2], high=[2, 3, 4], n=3)
    figure = lines([one], title="T", x="x", y="y", caption="Best of five rates.")
    assert figure.caption == "Best of five rates. Spread: lowest to highest, n = 3."
    (band,) = drawn(figure).axes.collections
    assert band.get_datalim(drawn(figure).axes.transData).get_points()[:, 1] == pytest.approx([0.5, 4])
    pair = [lines([Series("a", [0, 1, 2, 3], [1] * 4, n=n)], title="T", x="x", y="y") for n in (3, 1)]
    thick, thin = (line_named(drawn(figure).axes, style("ours").colour) for figure in pair)
    assert thick.get_linewidth() > thin.get_linewidth()


def test_published_points_are_open_and_carry_their_source(drawn) -> None:
    published = Series("lisa", [10, 20, 30, 40], [2.9, 2.8, 2.7, 2.6], source="Pan et al. 2024, Table 3")
    axes = drawn(lines([*four(), published], title="T", x="step", y="loss")).axes
    (line,) = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert line.get_linestyle() == "None"
    assert "Pan et al. 2024" in " ".join(text.get_text() for text in axes.texts)


def test_points_given_from_right_to_left_are_named_at_their_right_end(drawn) -> None:
    one = Series("a", [3, 2, 1, 0], [0.0, 1.0, 2.0, 3.0], low=[-1, 0, 1, 2], high=[1, 2, 3, 4])
    figure = lines([one], title="T", x="x", y="y")
    assert figure.alt.endswith("a goes from 3.00 to 0.")
    line = line_named(drawn(figure).axes, style("ours").colour)
    assert list(line.get_xdata()) == [0, 1, 2, 3]
    assert list(line.get_ydata()) == [3, 2, 1, 0]


def test_a_diverged_run_ends_at_its_last_number() -> None:
    figure = lines([Series("a", [0, 1, 2], [3.0, 2.0, math.nan])], title="T", x="x", y="y")
    assert figure.alt.endswith("a goes from 3.00 to 2.00.")
    assert "<svg" in figure.svg_light


@pytest.mark.parametrize("plot", [lines, scatter])
def test_nothing_to_draw_is_an_error(plot) -> None:
    for none in ([], [Series("a", [0, 1], [math.nan, math.inf])]):
        with pytest.raises(UserError, match="nothing to draw"):
            plot(none, title="T", x="x", y="y")


def test_a_scatter_puts_points_spreads_and_names_where_they_belong(drawn) -> None:
    shown = [
        Series("full", [4 * 2**30], [2.0], "reference", [1.9], [2.2], 3),
        Series("lisa", [2 * 2**30], [2.1], "ours"),
    ]
    figure = scatter(shown, title="T", x=Axis("peak", "B"), y=Axis("loss", "nat"))
    axes = drawn(figure).axes
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]
    assert points == [(4, 2.0), (2, 2.1)]
    assert [text.get_text() for text in axes.texts] == ["full", "lisa"]
    assert figure.alt == "Scatter plot of loss against peak: full at 4.00 GiB, 2.00 nat; lisa at 2.00 GiB, 2.10 nat."
    (bar,) = axes.collections
    assert bar.get_segments()[0][:, 1] == pytest.approx([1.9, 2.2])


def test_the_alternative_text_can_be_given() -> None:
    assert lines(four(), title="T", x="x", y="y", alt="Own words.").alt == "Own words."
