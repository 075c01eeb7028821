"""A curve's numbers are those of the pure functions, of its mean over draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from refusals import refused
from sparing.report import Record
from sparing.valley.scans import asymmetry as asym
from sparing.valley.scans import intervals
from sparing.valley.scans.curve import Curve
from sparing.valley.scans.plots import curve_figure

AT = np.linspace(-1, 1, 21)
SLOPES = np.array([[0.2], [0.4], [0.9]])


def curve(**changes):
    values = {"loss": 0.1 + AT**2 - SLOPES * AT**3, "error": 0.02 + 0.5 * AT**2 - 0.5 * SLOPES * AT**3}
    known = {"consistency": np.array([0.9, 1.0, 0.95]), "weighted_consistency": np.ones(3), "cosine": np.full(3, 0.8)}
    settings = {"direction": "gaussian", "lambdas": AT, "width": 1.0, "statistics": "exact", "seed": 0, "rows": 1000}
    return Curve(**settings | known | {"values": values, "distance": np.full(3, 5.0), "theta_norm": 5.0} | changes)


def test_asymmetry_is_that_of_the_mean_curve_with_its_interval():
    found = curve()
    for name, values in found.values.items():
        floor = asym.noise_floor(name, AT, values.mean(0), 1000)
        assert found.floor(name) == floor > 0
        assert found.asymmetry[name] == intervals.asymmetry_index(AT, values, floor=floor)
        assert found.asymmetry[name].value == pytest.approx(0.5 * 0.3025 / 0.385, abs=1e-12)
        assert found.branches[name] == asym.branch_means(AT, values.mean(0))
    # N + P is the same in all draws, so that the index is linear in the slopes and Fieller's interval Student's of them
    ends = np.array(stats.ttest_1samp(SLOPES[:, 0], 0.0).confidence_interval(0.95)) * 0.3025 / 0.385
    assert found.asymmetry["loss"].interval == pytest.approx(np.clip(ends, -1, 1), abs=1e-9)


def test_widths_and_parts_of_the_mean():
    found = curve()
    assert found.half_widths("error") == asym.half_widths(AT, found.mean("error"), 0.05)
    assert found.half_widths("loss") == asym.half_widths(AT, found.mean("loss"), 0.5)
    assert found.half_widths("loss", 0.1) == asym.half_widths(AT, found.mean("loss"), 0.1)
    assert found.odd_even("loss").cubic == pytest.approx(-0.5, abs=1e-9)


def test_band_is_the_interval_at_each_point():
    found = curve()
    low, high = found.band("loss")
    assert low.shape == high.shape == (21,)
    assert low[10] == high[10] == pytest.approx(0.1)
    ends = stats.ttest_1samp(1.1 - SLOPES[:, 0], 0.0).confidence_interval(0.95)
    assert (low[-1], high[-1]) == (pytest.approx(ends[0]), pytest.approx(ends[1]))


def test_rows_and_summary_fit_a_record():
    found = curve()
    rows = found.rows_of()
    assert len(rows) == 63
    assert rows[22] == {
        "direction": "gaussian", "width": 1.0, "draw": 1, "lambda": AT[1], "loss": found.values["loss"][1, 1],
        "error": found.values["error"][1, 1], "sign_consistency": 1.0, "weighted_consistency": 1.0, "cosine": 0.8,
        "distance": 5.0, "statistics": "exact",
    }  # fmt: skip
    record = Record(question="?", settings={}, seed=0)
    for row in rows:
        record.add("points", **row)
    for row in found.summary():
        record.add("curves", **row)
    loss = found.summary()[0]
    assert loss["asymmetry"] == found.asymmetry["loss"].value
    assert loss["sign_consistency"] == pytest.approx(0.95)
    assert (loss["half_width_minus"], loss["half_width_plus"]) == found.half_widths("loss")
    assert loss["at_zero"] == pytest.approx(0.1)


def test_a_metric_without_a_height_of_its_own():
    found = curve(values={"margin": AT**2 * np.ones((3, 1))})
    assert math.isnan(found.summary()[0]["half_width_plus"])
    refused("pass rise=", found.half_widths, "margin")
    refused("does not tell whether lower or higher is better", found.half_widths, "margin", 0.25)
    found = curve(values={"margin": AT**2 * np.ones((3, 1))}, better={"margin": "lower"})
    assert found.half_widths("margin", 0.25)[1] == pytest.approx(0.5)
    refused("margin", found.mean, "loss")


def test_titles_say_what_was_found():
    aligned = SLOPES
    close = {"loss": 0.1 + AT**2 - (0.5 + 0.1 * (aligned - 0.5)) * AT**3}
    assert curve(values=close).plot("loss").title == "Cross-entropy, flatter on the + side: 0.636 on −, 0.334 on +"
    # slopes of 0.2, 0.4 and 0.9: Student's interval of three such draws holds 0
    assert curve().plot("loss").title == "Cross-entropy, no telling which side is flatter: 0.636 on −, 0.334 on +"
    assert "no telling" in curve(values={"error": AT**2 - (aligned - 0.4) * AT**3}).plot("error").title
    assert "noise floor" in curve(floors={"error": 5.0}).plot("error").title


def test_pictures_say_scr_interval_and_statistics():
    figure = curve().plot()
    assert "asymmetry +0.39 [-0.31, +1.00], SCR 0.95" in figure.caption
    assert "Batch-norm statistics: exact." in figure.caption
    assert "95 % interval of the mean over draws, n = 3" in figure.caption
    assert figure.svg_light.startswith("<svg")
    two = curve_figure([curve(), curve(width=0.2), curve(width=0.2, statistics="stale")], "loss")
    assert "width 0.2, stale statistics: asymmetry" in two.caption


def test_infinite_points_are_gaps_in_pictures_and_raw_in_values():
    values = np.where(np.abs(AT) > 0.85, np.inf, AT**2) * np.ones((3, 1))
    values[0, 3] = np.nan
    found = curve(values={"loss": values})
    assert "Gaps: not finite." in found.plot().caption
    assert found.plot().svg_light.startswith("<svg")
    assert math.isnan(found.asymmetry["loss"].value)


def test_a_single_draw_has_no_band():
    one = curve(
        values={"loss": (AT**2)[None]}, consistency=np.ones(1), weighted_consistency=np.ones(1), cosine=np.ones(1),
        distance=np.ones(1),
    )  # fmt: skip
    assert one.draws == 1
    assert "interval" not in one.plot().caption
    assert "asymmetry +0.00, SCR 1.00" in one.plot().caption
