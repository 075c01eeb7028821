"""Scans against closed forms, and on the models that people have."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from refusals import refused
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.scaling import apply_
from sparing.scaling import plan as plan_of
from sparing.seeds import stream
from sparing.valley.directions.config import Given, Noise, Special
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans.batch_norm import refresh_
from sparing.valley.scans.evaluators import Classification, NextToken
from sparing.valley.scans.points import grid
from sparing.valley.scans.scan import scan
from valley import walks

RAW = Noise("gaussian")
ALIGNED = Noise("gaussian", sign="consistent")


def flat(vector):
    return torch.cat([x.detach().reshape(-1) for x in vector.values()]).double().numpy()


@pytest.mark.parametrize("direction", [RAW, ALIGNED, Special("self"), Noise("uniform", norm="raw")])
def test_a_quadratic_against_its_closed_form(direction):
    """f(θ + λsε) = f(θ) + λs ⟨∇f, ε⟩ + λ²s² ⟨ε, Hε⟩ / 2, and the index of that parabola."""
    model = walks.Quadratic()
    theta, scales = flat(named_parameters(model)), np.arange(1, 11)
    found = scan(model, walks.bowl, direction, points=9, widths=(1.0, 0.3), draws=3, seed=4)
    for curve in found.curves:
        for draw in range(curve.draws):
            step = curve.width * flat(direction_of(direction, model, seed=4, draw=draw).vector)
            slope, bend = (scales * theta * step).sum(), (scales * step**2).sum() / 2
            expected = (scales * theta**2).sum() / 2 + curve.lambdas * slope + curve.lambdas**2 * bend
            # float64 sums of ten terms of size 10
            np.testing.assert_allclose(curve.values["loss"][draw], expected, rtol=1e-12, atol=1e-12)
            cube = [((theta + at * step) ** 3).sum() for at in curve.lambdas]
            np.testing.assert_allclose(curve.values["cube"][draw], cube, rtol=1e-12, atol=1e-12)
    if direction == Special("self"):
        return
    bends = [(scales * flat(direction_of(direction, model, seed=4, draw=k).vector) ** 2).sum() / 2 for k in range(3)]
    slopes = [(scales * theta * flat(direction_of(direction, model, seed=4, draw=k).vector)).sum() for k in range(3)]
    m1, m2 = 0.625, 0.46875  # means of λ and λ² over ¼, ½, ¾, 1
    minus, plus = (sign * m1 * np.mean(slopes) + m2 * np.mean(bends) for sign in (-1, 1))
    ai = (minus - plus) / (abs(minus) + abs(plus))
    assert found.asymmetry["loss"].value == pytest.approx(ai, abs=1e-12)


def test_grid_is_mirrored_to_the_bit():
    for points, reach in ((3, 1.0), (21, 1.0), (41, 0.7)):
        at = grid(points, reach)
        assert (at == -at[::-1]).all()
        assert at[points // 2] == 0
        assert at[-1] == reach
        np.testing.assert_allclose(at, np.linspace(-reach, reach, points), rtol=0, atol=1e-15)


def measure_of(model_rows=40, dtype=torch.float64):
    return Classification(walks.images(model_rows, "test", dtype=dtype), walks.classes(model_rows))


def test_every_point_has_statistics_of_its_own():
    """Against a plain loop: another model, loaded with θ + λε, refreshed, evaluated."""
    model, measure, calibrate = walks.normed(), measure_of(), [walks.images(30)]
    found = scan(model, measure, ALIGNED, calibrate=calibrate, points=5, draws=2, widths=(0.5,), seed=1)
    theta = {name: p.detach().clone() for name, p in named_parameters(model).items()}
    for draw, (k, at) in itertools.product(range(2), enumerate(found.lambdas)):
        epsilon = direction_of(ALIGNED, model, seed=1, draw=draw).vector
        other = walks.normed()
        with torch.no_grad():
            for name, p in named_parameters(other).items():
                p.copy_(theta[name] + float(at) * 0.5 * epsilon[name])
        refresh_(other, calibrate)
        expected = measure(other)
        assert found.values["error"][draw, k] == expected["error"]
        # sum and product may be fused in one and not in the other: an ulp in θ
        assert found.values["loss"][draw, k] == pytest.approx(expected["loss"], rel=1e-12)


def test_ways_of_statistics_differ_and_are_told():
    model, measure, calibrate = walks.normed(), measure_of(), [walks.images(30), walks.images(20, "b")]
    options = {"points": 3, "draws": 1, "calibrate": calibrate}
    ways = ("exact", "cumulative", "stale", "batch")
    found = {way: scan(model, measure, ALIGNED, statistics=way, **options) for way in ways}
    ends = {found[way].values["loss"][0, 2] for way in ways}
    assert len(ends) == 4
    assert [found[way].statistics for way in ways] == list(ways)
    stale = measure(model)
    assert found["stale"].values["loss"][0, 1] == stale["loss"]


def test_widths_share_draws():
    found = scan(walks.plain(), Classification(walks.vectors(30), walks.classes(30)), RAW, points=5, widths=(1.0, 0.5))
    one, half = found.curves
    assert (one.values["loss"][:, [1, 2, 3]] == half.values["loss"][:, [0, 2, 4]]).all()
    np.testing.assert_array_equal(one.distance, 2 * half.distance)
    np.testing.assert_allclose(one.distance, one.theta_norm, rtol=1e-6)  # float32 vectors, scaled to ‖θ‖
    assert (one.consistency == half.consistency).all()


def test_directions_that_are_not_random_are_walked_once():
    model = walks.plain()
    measure = Classification(walks.vectors(9), walks.classes(9))
    for direction, draws in (
        (Special("sign"), 1),
        (Noise("one"), 1),
        (Noise("binary"), 4),
        (Special("sign", sign=0.5), 4),
    ):
        assert scan(model, measure, direction, points=3, draws=4).draws == draws


def test_an_interval_over_draws_and_a_floor_from_rows():
    model = walks.plain()
    measure = Classification(walks.vectors(30), walks.classes(30))
    found = scan(model, measure, RAW, points=5, reach=5.0)
    low, high = found.asymmetry["loss"].interval
    assert low <= found.asymmetry["loss"].value <= high
    assert found.asymmetry["loss"].floor == pytest.approx(2 * measure(model)["loss"] / math.sqrt(30))
    chosen = scan(model, measure, RAW, points=5, reach=5.0, floors={"error": 2.0})
    assert math.isnan(chosen.asymmetry["error"].value)
    assert chosen.asymmetry["loss"] == found.asymmetry["loss"]
    near = scan(model, measure, RAW, points=5, reach=1e-3)
    assert math.isnan(near.asymmetry["loss"].value)


class Failing:
    """Fails at the n-th call."""

    def __init__(self, calls, error):
        self.left, self.error = calls, error

    def __call__(self, model):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return {"loss": 1.0}


@pytest.mark.parametrize("calls", [0, 1, 2, 6])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), torch.OutOfMemoryError()])
def test_failures_pass_through_and_the_model_is_as_before(calls, error):
    model = walks.normed().train()
    before = walks.state(model)
    with pytest.raises(type(error)):
        scan(model, Failing(calls, error), RAW, calibrate=[walks.images(9)], points=5, draws=2)
    assert walks.same(before, walks.state(model))


def test_a_whole_scan_leaves_no_trace():
    model = walks.normed(torch.float32).train()
    before = walks.state(model)
    calibrate = [walks.images(9, dtype=torch.float32)]
    for way in ("exact", "cumulative", "stale", "batch"):
        measure = measure_of(9, torch.float32)
        scan(model, measure, RAW, calibrate=calibrate, statistics=way, points=3, draws=2)
    assert walks.same(before, walks.state(model))


def test_a_measure_that_trains_is_refused_and_the_model_is_as_before():
    model = walks.plain()
    before = walks.state(model)

    def step(model):
        with torch.enable_grad():
            loss = model(walks.vectors(9)).square().mean()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.data -= 0.1 * g
        return {"loss": float(loss)}

    refused(r"parameter 0.weight and 5 more changes; it must leave the model", scan, model, step, RAW)
    assert walks.same(before, walks.state(model))


CLOCK, TURN = itertools.count(), itertools.count()


@pytest.mark.parametrize(
    ("measure", "match"),
    [
        (lambda _: {"loss": next(CLOCK)}, "same weights"),
        (3, "called with the model"),
        (lambda _: {"loss": 1.0} if next(TURN) < 4 else {"cost": 1.0}, "some points only"),
    ],
)
def test_measures_that_cannot_be_trusted_are_refused(measure, match):
    refused(match, scan, walks.plain(), measure, RAW, points=3)


def test_values_far_out_stay_raw():
    def far(model):
        size = max(float(p.abs().max()) for p in model.parameters())
        return {"loss": size if size < 2 else math.inf, "other": 1.0 if size < 2 else math.nan}

    found = scan(walks.plain(), far, Special("self"), points=5, reach=3.0, better={"other": "lower"})
    assert np.isinf(found.values["loss"][0]).tolist() == [True, False, False, True, True]
    assert np.isnan(found.values["other"][0, 4])
    assert math.isnan(found.asymmetry["other"].value)
    assert found.values["loss"].dtype == np.float64


@pytest.mark.parametrize(
    "options",
    [{"points": 4}, {"points": 1}, {"reach": 0.0}, {"reach": math.inf}, {"widths": ()}, {"widths": (0.0,)},
     {"draws": 0}, {"workers": 0}, {"threads": 0}, {"statistics": "new"}],
)  # fmt: skip
def test_settings_that_cannot_be(options):
    with pytest.raises(UserError):
        scan(walks.plain(), Classification(walks.vectors(9), walks.classes(9)), RAW, **options)


def given_of(model, share):
    """A direction with a given share of the weights' signs, up to rounding."""
    vector = {}
    for name, p in named_parameters(model).items():
        drawn = torch.rand(p.shape, generator=stream(0, "flip", name)) < share
        vector[name] = torch.where(drawn, 1.0, -1.0) * p.detach().sign()
    return vector


def test_a_biased_direction_of_the_users_own_is_told():
    model = walks.randomise_(nn.Linear(100, 40))
    measure = Classification(torch.randn(9, 100, generator=stream(0)), walks.classes(9, count=40))
    for share, side in ((0.6, r"\+"), (0.35, "−")):
        with pytest.warns(UserWarning, match=rf"signs are those of the weights.* on its {side} side") as told:
            scan(model, measure, Given(given_of(model, share), name="mine"), points=3)
        assert [one.filename for one in told] == [__file__]
    assert "'mine': 35 %" in str(told[0].message).replace("%", " %").replace("34", "35").replace("36", "35")


def test_what_is_no_bias_is_not_told():
    """An effect too small, a number too small, signs that the caller asked for, noise of ours: silence."""
    model = walks.randomise_(nn.Linear(100, 40))
    measure = Classification(torch.randn(9, 100, generator=stream(0)), walks.classes(9, count=40))
    few = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(model, measure, Given(given_of(model, 0.5)), points=3)
        scan(model, measure, Given(given_of(model, 0.52)), points=3)
        scan(model, measure, Given(given_of(model, 0.9), sign="consistent"), points=3)
        scan(model, measure, ALIGNED, points=3)
        own = {name: p.detach().clone() for name, p in few.named_parameters()}
        scan(few, lambda _: {"loss": 1.0}, Given(own), points=3)  # 3 of 3 signs are an accident of one in four


def test_half_precision_is_told():
    model = walks.plain().bfloat16()
    measure = Classification(walks.vectors(9).bfloat16(), walks.classes(9))
    with pytest.warns(UserWarning, match="torch.bfloat16.*rounded away"):
        scan(model, measure, RAW, points=3, draws=1)


def test_progress_is_shown_where_it_is_asked_for(capsys):
    measure = Classification(walks.vectors(9), walks.classes(9))
    scan(walks.plain(), measure, RAW, points=3, draws=2)
    assert capsys.readouterr().err == ""
    scan(walks.plain(), measure, RAW, points=3, draws=2, label="valley")
    assert capsys.readouterr().err.startswith("valley: 5 points to do\nvalley: 5 points in")


def test_masked_weights_stay_zero_on_the_way():
    model = nn.Sequential(*[layer for k in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())], nn.Linear(16, 3))
    walks.randomise_(model)
    masks = apply_(model, plan_of(model, base=model, density=0.25), seed=0)
    measure = Classification(torch.randn(20, 16, generator=stream(0)), walks.classes(20))
    seen = []

    def watching(model):
        seen.append({name: masks.parameter(name).detach().clone() for name in masks})
        return measure(model)

    before = walks.state(model)
    found = scan(model, watching, Noise("one"), points=5)
    assert walks.same(before, walks.state(model))
    assert masks
    assert all(not one[name][~masks[name]].any() for one in seen for name in one)
    assert not torch.equal(seen[-1]["2.weight"], seen[0]["2.weight"])
    assert math.isfinite(found.values["loss"].sum())


def test_hugging_face_gpt2_with_a_tied_head():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=23, n_positions=12, bos_token_id=0, eos_token_id=0
    )
    model = walks.randomise_(transformers.GPT2LMHeadModel(config))
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = walks.classes(60, "tokens", count=23).view(6, 10)
    before = walks.state(model)
    found = scan(model, NextToken(tokens, batch_size=4), RAW, points=3, draws=2)
    assert walks.same(before, walks.state(model))
    assert model.lm_head.weight is model.transformer.wte.weight
    logits = model.eval()(tokens).logits.detach()[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert found.values["loss"][0, 1] == pytest.approx(float(loss), rel=1e-6)
    assert found.rows == 54
    epsilon = direction_of(RAW, model, seed=0, draw=1).vector
    assert "lm_head.weight" not in epsilon
    with torch.no_grad():
        for name, p in named_parameters(model).items():
            p += epsilon[name]
    moved = NextToken(tokens, batch_size=4)(model)["loss"]
    assert found.values["loss"][1, 2] == pytest.approx(moved, rel=1e-5)


def test_summary_and_rows_of_all_widths():
    found = scan(
        walks.plain(), Classification(walks.vectors(9), walks.classes(9)), RAW, points=3, draws=2, widths=(1.0, 0.1)
    )
    assert [(row["width"], row["metric"]) for row in found.summary()] == [
        (1.0, "loss"), (1.0, "error"), (0.1, "loss"), (0.1, "error"),
    ]  # fmt: skip
    assert len(found.rows_of()) == 2 * 2 * 3
    assert found.branches == found.branches
    assert found.half_widths("loss") == found.half_widths("loss")
    assert found.odd_even("loss").odd.tolist() == found.odd_even("loss").odd.tolist()
    assert "Cross-entropy" in found.plot().title
