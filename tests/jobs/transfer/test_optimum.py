"""Best rates, drift and regret against curves whose answers are known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sparing.jobs.transfer.optimum import bootstrap, collapse, mean_curve, optimum, regret, slope_of, vertex

INF = math.inf


@pytest.mark.parametrize("centre", [-6.4, -6.0, -5.7])
@pytest.mark.parametrize("step", [0.5, 1.0])
def test_parabola_is_found_exactly(centre, step):
    curve = {-8 + step * at: 1.5 + 0.3 * (-8 + step * at - centre) ** 2 for at in range(round(4 / step) + 1)}

    found = optimum(curve)

    assert found.kind == "inside"
    assert not found.censored
    assert found.x == pytest.approx(centre, abs=1e-9)  # three points fix a parabola: rounding only
    assert found.loss == min(curve.values())


def test_uneven_steps_are_allowed():
    curve = {x: (x + 5.2) ** 2 for x in (-9, -6, -5, -3)}
    assert optimum(curve).x == pytest.approx(-5.2)


@pytest.mark.parametrize(
    ("curve", "kind", "x"),
    [
        ({-3: 1.0, -2: 2.0, -1: 3.0}, "lowest tried", -3),
        ({-3: 3.0, -2: 2.0, -1: 1.0}, "highest tried", -1),
        ({-3: 3.0, -2: 2.0, -1: INF}, "edge of divergence", -2),
        ({-2: 2.0}, "lowest tried", -2),
    ],
)
def test_ends_of_the_sweep_are_told_apart(curve, kind, x):
    found = optimum(curve)
    assert (found.kind, found.x, found.grid) == (kind, x, x)


def test_nothing_converged_is_no_optimum():
    found = optimum({-2: INF, -1: INF})
    assert found.kind == "none"
    assert found.censored
    assert math.isnan(found.x)
    assert optimum({}).kind == "none"


def test_equal_losses_take_the_lower_rate_and_their_middle():
    assert optimum({-3: 2.0, -2: 1.0, -1: 1.0, 0: 2.0}).x == -1.5


def test_three_points_on_a_line_have_no_vertex():
    assert vertex([(-1, 1.0), (0, 1.0), (1, 1.0)]) == 0


def test_slope_is_that_of_the_line():
    assert slope_of((x, 3 - 0.75 * x) for x in (0, -1, -2, -5)) == pytest.approx(-0.75)
    assert slope_of([(1, 2), (1, 3)]) is None
    assert slope_of([]) is None


def test_regret_is_relative_and_keeps_divergence():
    curve = {-3: 2.0, -2: 1.0, -1: 1.25, 0: INF}
    assert regret(curve, -2) == 0
    assert regret(curve, -1) == 0.25
    assert regret(curve, 0) == INF
    assert math.isnan(regret(curve, 7))
    assert regret({-2: INF, -1: INF}, -1) == INF
    assert math.isnan(regret({-2: INF}, math.nan))


def test_collapse_looks_below_both_optima_only():
    dense = {-4: 4.0, -3: 2.0, -2: 1.0, -1: 9.0}
    sparse = {-4: 8.0, -3: 3.0, -2: 1.5, -1: 1.2}
    assert collapse(sparse, dense) == pytest.approx(math.log(2))  # at -4; -1 lies above the dense optimum
    assert collapse(dense, dense) == 0
    assert collapse({-4: INF, -3: 2.0}, dense) == INF
    assert collapse({-4: INF, -3: INF}, dense) == INF
    assert collapse(dense, {-4: INF, -3: INF}) == INF
    assert math.isnan(collapse({-1: INF}, dense))  # tried above the dense optimum alone
    assert math.isnan(collapse({-4: INF}, {-4: INF}))


def test_a_diverged_seed_makes_the_mean_infinite_and_a_missing_one_a_gap():
    assert mean_curve([{0: 1.0, 1: 2.0, 2: 3.0}, {0: 3.0, 1: INF}]) == {0: 2.0, 1: INF}
    assert mean_curve([]) == {}


def test_bootstrap_holds_the_mean_of_known_seeds():
    values = {0: 1.0, 1: 2.0, 2: 6.0}

    low, high = bootstrap(lambda seeds: sum(values[seed] for seed in seeds) / 3, (0, 1, 2))

    assert low == 1.0  # three times seed 0 has chance 1/27 > 2.5 %
    assert high == 6.0
    assert bootstrap(lambda seeds: 1.0, (0,)) is None
    assert bootstrap(lambda seeds: None, (0, 1)) is None
    assert bootstrap(lambda seeds: 5.0, (0, 1)) == (5.0, 5.0)


def test_an_interval_reaches_to_infinity_where_a_seed_diverges():
    """Of 27 samples of three seeds 8 lack seed 1: 30 % are finite, so the upper end is infinite and the lower is not;
    with one such seed of two, three of four samples are infinite; without a finite one both ends are."""
    for bad, ends in (({1}, (0.0, INF)), ({0, 1, 2}, (INF, INF)), (set(), (0.0, 0.0))):
        assert bootstrap(lambda some, bad=bad: INF if bad & set(some) else 0.0, (0, 1, 2)) == ends
    assert bootstrap(lambda some: math.nan if 1 in some else 2.0, (0, 1)) == (2.0, 2.0)


@pytest.mark.parametrize("at", [9, 10, 11])
def test_an_end_of_an_interval_is_the_line_between_order_statistics_also_at_infinity(at, monkeypatch):
    """399 · 0.975 = 389.025: between the values of rank 389 and 390, of which each may be infinite."""
    values = iter([*[0.0] * (400 - at), *[INF] * at])
    monkeypatch.setattr("sparing.jobs.transfer.optimum.torch.randint", lambda *_, **__: torch.arange(800).view(400, 2))
    _, high = bootstrap(lambda some: next(values), range(800))
    ranked = [0.0] * (400 - at) + [INF] * at
    assert high == (INF if INF in ranked[389:391] else 0.0)
