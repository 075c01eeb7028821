"""Pictures and sentences of a scan, from records made by hand."""

from __future__ import annotations

import math

import pytest

from snapshots import check_page
from sparing.jobs.scan.curves import SPECIALS
from sparing.jobs.scan.figures import (
    ACROSS,
    AS_DRAWN,
    across,
    group_figure,
    hundredths,
    noise_figure,
    ratio_figures,
    scale_figure,
    special_figure,
)  # fmt: skip
from sparing.jobs.scan.page import PAGE, answer, caveats, noises_text, range_text, too_far, verdict
from sparing.jobs.scan.panels import forest
from sparing.jobs.scan.settings import Settings
from sparing.report import Record


def made(curves, **changes) -> Record:
    """A record of curves given as (kind, ratio, index, low, high, losses)."""
    settings = Settings(model="m:f", noises=("gaussian",), points=5, **changes)
    record = Record(question="Q?", settings=settings, seed=0, environment={})
    model = {"name": "m:f", "metrics": "loss", "metric": "loss", "source": "", "refreshed": True, "parameters": 3}
    record.add("model", **model, at_loss=0.1)
    signs = {0.0: "raw", 1.0: "consistent"}
    for number, (ratio, index, low, high, losses) in enumerate(curves):
        told = {"asymmetry_loss": index, "asymmetry_loss_low": low, "asymmetry_loss_high": high}
        record.add(
            "curves", curve=number, kind="gaussian", sign=signs.get(ratio, str(ratio)), ratio=ratio, group="all",
            width=1.0, n=2, consistency=0.5 + ratio / 2, plus_loss=1.0, minus_loss=1.0, **told,
        )  # fmt: skip
        for draw in range(2):
            for step, loss in zip((-1.0, -0.5, 0.0, 0.5, 1.0), losses, strict=True):
                record.add("values", curve=number, draw=draw, step=step, loss=loss)
    return record


VALLEY = (2.0, 0.5, 0.1, 0.5, 2.0)
SLOPE = (2.0, 0.5, 0.1, 0.15, 0.2)


def test_snapshot():
    record = made([(0.0, 0.01, -0.1, 0.1, VALLEY), (0.5, 0.4, 0.3, 0.5, VALLEY), (1.0, 0.8, 0.7, 0.9, SLOPE)],
                  ratios=(0.0, 0.5, 1.0))  # fmt: skip
    record.add("curves", **record.table("curves")[0] | {"curve": 3, "kind": "self"})
    record.rows += [row | {"curve": 3} for row in record.rows if row["table"] == "values" and row["curve"] == 0]
    record.add("left_out", group="conv")
    record.add("layers", layer="bn", kind="BatchNorm1d", mean=0.1, positive=0.75, count=4)
    for left, right, count in ((-1.0, 0.0, 1), (0.0, 1.0, 3)):
        record.add("scales", left=left, right=right, count=count)
    check_page(PAGE.of(record), __file__)
    assert "<svg" in scale_figure(record).svg("dark", narrow=True)


def test_the_sentence_says_what_the_intervals_say():
    record = made([(0.0, 0.01, -0.1, 0.1, VALLEY), (1.0, 0.8, 0.7, 0.9, SLOPE)])
    assert "flatter on the side where weights grow" in answer(record)
    raw, consistent = ([row] for row in record.table("curves"))
    assert "other way round" in verdict(raw, [raw[0] | {"asymmetry_loss_high": -0.2}], "loss")
    assert "do not show a flat side" in verdict(consistent, raw, "loss")
    assert "clearly flatter, and flatter than as drawn, for 1 of 2" in verdict(raw * 2, [*consistent, *raw], "loss")
    assert range_text([raw[0] | {"asymmetry_loss": None}], "loss") == "below the noise"


def test_hundredths_have_a_true_minus_and_no_negative_zero():
    assert [hundredths(x) for x in (0.014, -0.204, -0.001, math.nan)] == ["0.01", "−0.20", "0.00", "–"]


def test_infinite_and_steep_values_are_drawn_by_their_logarithm():
    wild = (math.inf, 900.0, 0.1, 900.0, 3000.0)
    record = made([(0.0, None, None, None, wild), (1.0, 0.8, 0.7, 0.9, wild)])
    drawn = noise_figure(record, "loss").svg()
    assert "10³" in drawn or "1000" in drawn
    assert "asymmetry – · SCR 0.50" in drawn


def test_a_walk_to_a_plateau_is_told():
    plateau = (2.0, 1.9, 0.1, 1.9, 2.0)
    assert too_far(made([(0.0, 0.0, -0.1, 0.1, plateau), (1.0, 0.0, -0.1, 0.1, plateau)]))
    near = made([(0.0, 0.0, -0.1, 0.1, VALLEY), (1.0, 0.8, 0.7, 0.9, SLOPE)])
    assert not too_far(near)
    assert not any("plateau" in note for note in caveats(near))


def test_a_single_ratio_has_no_dose_response():
    assert ratio_figures(made([(0.0, 0.0, -0.1, 0.1, SLOPE)], ratios=(0.0,))) == []


@pytest.mark.parametrize(("low", "losses", "pictures"), [(None, SLOPE, 2), (None, (math.inf, 1, 0.1, 1, 1), 1)])
def test_one_draw_or_an_infinite_loss_leaves_a_page(low, losses, pictures):
    curves = [(ratio, ratio, low, low, losses) for ratio in (0.0, 1.0)]
    drawn = ratio_figures(made(curves, ratios=(0.0, 1.0)))
    assert len(drawn) == pictures
    assert all("<svg" in figure.svg() for figure in drawn)
    assert len(ratio_figures(made([(ratio, None, None, None, SLOPE) for ratio in (0.0, 1.0)], ratios=(0.0, 1.0)))) == 1


@pytest.mark.parametrize("narrow", [False, True])
def test_marks_without_a_value_or_an_interval_are_left_out(narrow):
    marks = [(0.5, math.nan, math.nan), (math.nan, math.nan, math.nan)]
    figure = forest([("all", marks)], names=("a", "b"), roles=("baseline", "ours"), title="T", x="index")
    assert "all" in figure.svg(narrow=narrow)


def special(*indices) -> Record:
    """A record of special directions with these indices, None below the noise."""
    record = made([], parts=("special",))
    for number, (kind, index) in enumerate(zip(SPECIALS, indices, strict=False)):
        told = {"asymmetry_loss": index, "asymmetry_loss_low": None, "asymmetry_loss_high": None}
        record.add("curves", curve=number, kind=kind, sign="raw", ratio=0.0, group="all", width=1.0, n=1,
                   consistency=1.0, plus_loss=1.0, minus_loss=1.0, **told)  # fmt: skip
        for step, loss in zip((-1.0, -0.5, 0.0, 0.5, 1.0), VALLEY, strict=True):
            record.add("values", curve=number, draw=0, step=step, loss=loss)
    return record


@pytest.mark.parametrize(
    ("indices", "title"),
    [
        # an index of −0.9 is the most lopsided, and one that is not known is neither the largest nor the smallest
        ((None, 0.2, -0.9), "The most lopsided is sign(θ), −0.90; the least θ, the weights, 0.20"),
        ((0.2, -0.9, None), "The most lopsided is θ, the weights, −0.90; the least θ₀, the start, 0.20"),
        ((None, -0.3), "The most lopsided is θ, the weights, −0.30"),
        ((None, None), "No special direction rises above the noise"),
    ],
)
def test_titles_weigh_sizes_and_leave_out_what_is_no_number(indices, title):
    assert special_figure(special(*indices)).title == title


def test_the_title_of_groups_weighs_sizes():
    record = made([(1.0, 0.2, 0.1, 0.3, SLOPE)])
    record.add("curves", **record.table("curves")[0] | {"curve": 1, "group": "norm", "asymmetry_loss": -0.8})
    assert group_figure(record).title == "With the weights' signs, the most lopsided is norm layers (NORM): −0.80"


@pytest.mark.parametrize(
    ("raw", "consistent", "told"),
    [
        # from −0.9 to −0.3 the signed index rises, and the + side is still the steep one
        ((-0.9, -0.95, -0.8), (-0.3, -0.4, -0.2), "along no noise"),
        ((0.0, -0.1, 0.1), (0.3, -0.2, 0.8), "along no noise"),
        ((None, None, None), (0.3, 0.2, 0.4), "1 of 1 noises"),
        ((0.9, 0.8, 0.95), (None, None, None), "along no noise"),
    ],
)
def test_a_title_counts_sides_that_are_told_to_be_flat(raw, consistent, told):
    record = made([(0.0, *raw, VALLEY), (1.0, *consistent, SLOPE)])
    title = noise_figure(record, "loss").title
    assert title.startswith("With the weights' signs, the loss rises ")
    assert title.endswith(told)


def test_a_curve_without_a_minimum_is_told_everywhere():
    record = made([(0.0, 0.0, -0.1, 0.1, VALLEY), (1.0, 1.0, 1.0, 1.0, SLOPE)])
    for row in record.table("curves"):
        row["minimum_loss"] = row["ratio"] == 0.0
    record = Record(question="Q?", settings=record.settings, seed=0, environment={}, rows=[
        row | ({"minimum_loss": row["ratio"] == 0.0} if row["table"] == "curves" else {}) for row in record.rows
    ])  # fmt: skip
    assert "asymmetry 1.00, no minimum" in noise_figure(record, "loss").alt
    assert noise_figure(record, "loss").title.endswith("along no noise")
    assert "**of no minimum**" in answer(record)
    assert "Along 1 of 2 curves the loss gets better on a side" in caveats(record)[0]


def test_titles_name_the_last_ratio_and_axes_the_length_of_a_step():
    some = made([(0.0, 0.01, -0.1, 0.1, VALLEY), (0.5, 0.4, 0.3, 0.5, SLOPE)], ratios=(0.0, 0.5), norm="raw")
    assert any(figure.title.startswith("At r = 0.5 the mean loss") for figure in ratio_figures(some))
    usual = made([(0.0, 0.01, -0.1, 0.1, VALLEY), (1.0, 0.8, 0.7, 0.9, SLOPE)], ratios=(0.0, 1.0))
    assert (across(some), across(usual)) == (AS_DRAWN, ACROSS)
    assert "the noise as drawn has been added" in noises_text(some)
    assert "their own length" in noises_text(usual)
    assert "their own length" not in noises_text(some)
