"""Ticks are plain numbers or powers, alike along one axis."""

from __future__ import annotations

import pytest

from sparing.report.axes import reference_line, tick_texts
from sparing.report.cells import Scale
from sparing.report.plots import Axis, Series, lines


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 0.1, 0.2, 0.30000000000000004], ["0.0", "0.1", "0.2", "0.3"]),
        ([2.0, 2.5, 3.0], ["2.0", "2.5", "3.0"]),
        ([-20.0, 0.0, 20.0], ["−20", "0", "20"]),
        ([9000.0, 12000.0], ["9000", "12,000"]),
        ([0.0, 2.5e6], ["0.0", "2.5 M"]),
        ([0.0, 2e-5, 4e-5], ["0", "2 × 10⁻⁵", "4 × 10⁻⁵"]),
        ([1e9, 2e9], ["10⁹", "2 × 10⁹"]),
        ([], []),
    ],
)
def test_linear_ticks(values, texts) -> None:
    assert tick_texts(values) == texts


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.001, 0.01, 0.1], ["0.001", "0.01", "0.1"]),
        ([1e-4, 1e-3], ["10⁻⁴", "10⁻³"]),
        ([2e-5, 5e-5, 1e-4], ["2 × 10⁻⁵", "5 × 10⁻⁵", "10⁻⁴"]),
    ],
)
def test_logarithmic_ticks(values, texts) -> None:
    assert tick_texts(values, log=True) == texts


def figure(x: Axis, y: Axis, xs=(1, 2, 4), ys=(1e9, 2e9, 4e9)):
    return lines([Series("a", xs, ys)], title="T", x=x, y=y)


def test_limits_are_given_in_the_unit_of_the_data(drawn) -> None:
    axes = drawn(figure(Axis("x"), Axis("y", "B", low=2**30, high=2**33))).axes
    assert axes.get_ylim() == pytest.approx((1, 8))


def test_powers_of_two(drawn) -> None:
    axes = drawn(figure(Axis("rate", log=2), Axis("y"), xs=(2**-8, 2**-6, 2**-4), ys=(1, 2, 3))).axes
    axes.figure.draw_without_rendering()
    assert axes.get_xscale() == "log"
    assert "2⁻⁶" in [label.get_text() for label in axes.get_xticklabels()]


def test_the_labels_carry_quantity_and_unit(drawn) -> None:
    axes = drawn(figure(Axis("step"), Axis("peak_memory", "B"))).axes
    assert axes.get_xlabel() == "step"
    assert axes.get_title(loc="left") == "peak memory (GiB)"


def test_ticks_are_few_on_a_phone(drawn) -> None:
    wide, narrow = (drawn(figure(Axis("x"), Axis("y"), xs=(0, 500, 999)), narrow=small).axes for small in (False, True))
    assert len(narrow.get_xticks()) < len(wide.get_xticks()) <= 8


@pytest.mark.parametrize(("at", "side"), [(0.1, "left"), (0.5, "center"), (0.95, "right")])
def test_the_words_of_a_mark_stay_inside(drawn, at, side) -> None:
    canvas = drawn(figure(Axis("x", low=0, high=1), Axis("y"), xs=(0, 0.5, 1)))
    reference_line(canvas, (at, "limit"), Scale(1, ""))
    assert canvas.axes.texts[-1].get_ha() == side
