"""Planes: their axes are scans, and a quadratic has its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.valley.directions.config import Given, Noise, Special
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan
from sparing.valley.scans.surface import scan2d
from valley import walks

RAW, ALIGNED = Noise("gaussian"), Noise("gaussian", sign="consistent")


def flat(vector):
    return torch.cat([x.detach().reshape(-1) for x in vector.values()]).double().numpy()


def test_a_quadratic_against_its_closed_form():
    model = walks.Quadratic()
    theta, scales = flat(named_parameters(model)), np.arange(1, 11)
    found = scan2d(model, walks.bowl, RAW, ALIGNED, points=5, width=0.4, reach=2.0, seed=7)
    a = flat(direction_of(RAW, model, seed=7, draw=0).vector)
    b = flat(direction_of(ALIGNED, model, seed=7, draw=1).vector)
    for i, x in enumerate(found.lambdas):
        for j, y in enumerate(found.lambdas):
            at = theta + 0.4 * (x * a + y * b)
            # float64 sums of ten terms of size 10 to 100
            assert found.values["loss"][i, j] == pytest.approx((scales * at**2).sum() / 2, rel=1e-12, abs=1e-12)
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-12)
    assert found.consistency[1] == 1.0


def test_its_axes_are_scans_to_the_bit():
    model = walks.normed(torch.float32)
    measure = Classification(walks.images(20, "test", dtype=torch.float32), walks.classes(20))
    calibrate = [walks.images(15, dtype=torch.float32)]
    before = walks.state(model)
    found = scan2d(model, measure, RAW, ALIGNED, calibrate=calibrate, points=5, width=0.5)
    assert walks.same(before, walks.state(model))
    first = scan(model, measure, RAW, calibrate=calibrate, points=5, widths=(0.5,), draws=1)
    second = scan(model, measure, ALIGNED, calibrate=calibrate, points=5, widths=(0.5,), draws=2)
    for name, values in found.values.items():
        assert (values[:, 2] == first.values[name][0]).all()
        assert (values[2, :] == second.values[name][1]).all()
    assert found.statistics == "exact"
    assert found.rows == 20


def test_two_noises_of_one_kind_differ():
    found = scan2d(walks.Quadratic(20), walks.bowl, RAW, RAW, points=3)
    assert abs(found.cosine) < 0.9


def test_one_direction_twice_spans_no_plane():
    with pytest.raises(UserError, match=r"cosine of \+1.0000"):
        scan2d(walks.Quadratic(), walks.bowl, Special("self"), Special("self"), points=3)


def test_directions_may_move_different_parameters():
    model = walks.Quadratic()
    flips = {name: torch.ones_like(p).reshape(-1) for name, p in named_parameters(model).items()}
    for one in flips.values():
        one[::2] = -1  # signs of their own, so that neither leans
    parts = [Given({name: one.view_as(p)}, name=name) for (name, p), one in zip(
        named_parameters(model).items(), flips.values(), strict=True)]  # fmt: skip
    found = scan2d(model, walks.bowl, *parts, points=3)
    assert found.cosine == 0
    assert found.directions == ("weight", "bias")


def test_rows_of_a_surface():
    found = scan2d(walks.Quadratic(), walks.bowl, RAW, ALIGNED, points=3)
    rows = found.rows_of()
    assert len(rows) == 9
    assert rows[5]["lambda_first"] == 0
    assert rows[5]["lambda_second"] == 1
    assert rows[5]["loss"] == found.values["loss"][1, 2]


def test_plot_has_the_first_direction_across():
    pytest.importorskip("matplotlib")
    found = scan2d(walks.Quadratic(), walks.bowl, RAW, ALIGNED, points=3)
    figure = found.plot("loss")
    svg = figure.svg_light
    assert "λ along gaussian" in svg
    assert "λ along gaussian, sign-consistent" in svg
    assert svg.startswith("<svg")
    assert "middle" in figure.title


@pytest.mark.parametrize("options", [{"points": 4}, {"width": 0.0}, {"reach": -1.0}, {"workers": 0}])
def test_settings_that_cannot_be(options):
    with pytest.raises(UserError):
        scan2d(walks.Quadratic(), walks.bowl, RAW, ALIGNED, **options)
