"""Scans to a stated precision, against a model whose variances are known, and against plain sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from refusals import refused
from sparing.blocks import named_parameters
from sparing.seeds import stream
from sparing.valley.directions.config import Noise, Special
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans.allocation import Costs, components, rows_of_a_draw, spend, standard_errors
from sparing.valley.scans.asymmetry import index
from sparing.valley.scans.batch_norm import refresh_
from sparing.valley.scans.evaluators import Classification, NextToken
from sparing.valley.scans.intervals import ratio_interval
from sparing.valley.scans.points import grid
from sparing.valley.scans.precise import MOVE, row_order
from sparing.valley.scans.scan import scan
from sparing.valley.scans.workers import ScanTask
from valley import walks

MEANS, BETWEEN, WITHIN = (1.0, 0.6), 0.2, 0.7
# Of a row of a draw, to first order: 2 (P n − N p) / (N + P)²
SLOPE = 2 * math.hypot(*MEANS) / sum(MEANS) ** 2
TRUTH = (MEANS[0] - MEANS[1]) / sum(MEANS)


def drawn(seed, between=BETWEEN, within=WITHIN):
    """Rises of draws and rows, normal, with these deviations."""
    rng, known = np.random.default_rng(seed), {}

    def measure(draws, rows):
        for draw in draws:
            known.setdefault(draw, between * rng.normal(size=2))
        parts = [known[draw] + within * rng.normal(size=(rows, 2)) for draw in draws]
        return (np.array(MEANS) + np.array(parts))[:, :, None]

    return measure


def test_the_precision_that_is_asked_for_is_reached_and_covers_the_truth():
    """200 seeds: the deviation of the indices is what was asked, and 95 % of intervals hold the truth."""
    asked, misses, told, held = 0.05, [], [], 0
    for seed in range(200):
        found = spend(drawn(seed), asked, Costs(points=1, move=16.0, available=100_000))
        rises = found.pairs.mean(1)[:, 0]
        minus, plus = rises.mean(0)
        misses.append((minus - plus) / (abs(minus) + abs(plus)) - TRUTH)
        told.append(found.errors[0])
        low, high = ratio_interval(rises)
        held += low <= TRUTH <= high
        assert found.errors.max() <= asked
        assert not found.limit
    # a deviation of 200 normal numbers is known to 5 %: three of those, and a tenth for stopping when it looks reached
    assert asked * 0.75 < np.std(misses) < asked * 1.25
    # t / z of the fewest draws, 8, is 1.2: what is told lies at most so far below what was asked
    assert asked * 0.75 < np.mean(told) <= asked
    # 95 % of 200 is 190 ± 3: four of those below, for stopping when the spread looks small
    assert held >= 178


def test_variances_are_those_of_the_law():
    pairs = drawn(0)(range(400), 50)
    between, within = components(pairs)
    # a variance of 400 numbers is known to 7 %, one of 20,000 to 1 %
    assert between[0] == pytest.approx((SLOPE * BETWEEN) ** 2, rel=0.25)
    assert within[0] == pytest.approx((SLOPE * WITHIN) ** 2, rel=0.05)
    error = math.sqrt(((SLOPE * BETWEEN) ** 2 + (SLOPE * WITHIN) ** 2 / 50) / 400)
    assert standard_errors(pairs.mean(1))[0] == pytest.approx(error, rel=0.15)


@pytest.mark.parametrize(("between", "within", "cost"), [(0.04, 0.5, 16.0), (0.01, 0.5, 100.0), (0.2, 0.1, 512.0)])
def test_the_split_is_cochrans(between, within, cost):
    costs = Costs(points=1, move=cost, available=10**6)
    rows = rows_of_a_draw(np.array([between]), np.array([within]), 0.002, costs, least=(8, 2))
    # the cost is flat around its least, and draws are whole numbers
    assert rows == pytest.approx(math.sqrt(cost * within / between), rel=0.05)


def test_equal_splitting_runs_more_rows():
    """Rows run until 0.05 is reached, calibration too: split by variances, and as many rows as draws."""
    costs = Costs(points=21, calibration=200, available=10**6)
    ours = [spend(drawn(seed), 0.05, costs).evaluated for seed in range(20)]
    equal = []
    for seed in range(20):
        measure, n = drawn(seed), 8
        pairs = measure(range(n), n)
        while standard_errors(pairs.mean(1))[0] > 0.05:
            n += 1
            pairs = np.concatenate([pairs, measure(range(n - 1), 1)], 1)
            pairs = np.concatenate([pairs, measure(range(n - 1, n), n)], 0)
        equal.append(costs.rows(n, n))
    assert np.mean(ours) < np.mean(equal)


class Known(nn.Module):
    """Forty weights; what a scan along Gaussian noise does to them is known in closed form."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.linspace(0.5, 1.5, 40, dtype=torch.float64))
        self.register_buffer("start", self.theta.detach().clone())


class Rows:
    """Rises 1 ± 0.3 z + (row) ± 0.6 (row) z' at λ = ∓1, where z and z' are the first two numbers of the noise."""

    def __init__(self, own, slopes):
        self.own, self.slopes = own, slopes
        self.better = {"height": "lower"}

    def __len__(self):
        return len(self.own)

    def choose(self, rows):
        return Rows(self.own[rows], self.slopes[rows])

    def each(self, model):
        step = (model.theta - model.start) / model.start.norm() * math.sqrt(40)
        length = step.norm() / math.sqrt(40)
        return {"height": length * (1 + self.own) - 0.3 * step[0] - 0.6 * self.slopes * step[1]}

    def __call__(self, model):
        return {"height": float(self.each(model)["height"].mean())}


def known_rows(seed, count=4000):
    rng = np.random.default_rng(seed)
    return Rows(torch.tensor(rng.normal(size=count)) * 0.5, torch.tensor(rng.normal(size=count)))


def test_a_scan_of_known_variances():
    """What a row is like cancels, so that the index varies by 0.3² between draws and 0.6² between rows; truth is 0."""
    found = [
        scan(Known(), known_rows(seed), Noise("gaussian"), points=3, precision=0.06, seed=seed) for seed in range(24)
    ]
    indices = np.array([one.asymmetry["height"].value for one in found])
    held = sum(one.asymmetry["height"].interval[0] <= 0 <= one.asymmetry["height"].interval[1] for one in found)
    # the deviation of 24 numbers is known to 15 %: three of those
    assert 0.06 * 0.55 < indices.std() < 0.06 * 1.45
    # 95 % of 24 is 23 ± 1
    assert held >= 19
    assert all(one.allocation.reached <= 0.06 and not one.allocation.limit for one in found)
    parts = [one.allocation.parts[0] for one in found]
    # means over 24 scans of 20 to 40 draws; each row of "between" is a variance of that many numbers
    assert np.mean([part.between for part in parts]) == pytest.approx(0.09, rel=0.2)
    assert np.mean([part.within for part in parts]) == pytest.approx(0.36, rel=0.25)


def test_every_draw_is_measured_on_rows_of_its_own():
    """Against a loop over draws with their rows, from the order of rows that the seed gives."""
    model, rows = walks.normed(), 1000
    noise, calibrate = Noise("gaussian", sign="consistent"), [walks.images(30)]
    refresh_(model, calibrate)
    images = walks.images(rows, "test", dtype=torch.float64)
    # its own answers, so that it stands in a valley
    measure = Classification(images, model(images).argmax(1))
    found = scan(model, measure, noise, calibrate=calibrate, points=3, widths=(0.5, 0.25), precision=0.1, seed=3)
    spent = found.allocation
    assert spent.draws * spent.rows <= rows
    order = row_order(ScanTask(model=model, evaluate=measure, directions=(noise,), seed=3))
    first = Costs(points=1, calibration=30, move=MOVE, available=rows).first_rows(8)
    starts = [list(range(draw * first, (draw + 1) * first)) for draw in range(8)]
    more = spent.rows - first
    starts = [one + list(range(8 * first + k * more, 8 * first + (k + 1) * more)) for k, one in enumerate(starts)]
    starts += [list(range(draw * spent.rows, (draw + 1) * spent.rows)) for draw in range(8, spent.draws)]
    for draw, (k, curve) in itertools.product((0, 7, spent.draws - 1), enumerate(found.curves)):
        own = measure.choose(order[starts[draw]])
        for at in (0, 1, 2):
            step = curve.lambdas[at] * (0.5, 0.25)[k]
            vector = direction_of(noise, model, seed=3, draw=draw).vector
            other = walks.normed()
            with torch.no_grad():
                for name, parameter in named_parameters(other).items():
                    parameter.add_(vector[name], alpha=float(step))
            refresh_(other, calibrate)
            # sums over rows in another order
            assert curve.values["loss"][draw, at] == pytest.approx(own(other)["loss"], rel=1e-9)
    calibration = 30
    least = spent.draws * 5 * (spent.rows + calibration)
    # the first draws are run a second time where they get more rows
    assert spent.evaluated in (least, least + 8 * 5 * calibration)


def test_the_same_seed_gives_the_same_bits_with_any_number_of_processes():
    def once(workers, seed=1):
        net = nn.Sequential(nn.Embedding(7, 7), nn.Linear(7, 7, bias=False))
        with torch.no_grad():
            net[0].weight.copy_(torch.eye(7).roll(1, 0))
            net[1].weight.copy_(3 * torch.eye(7) + 0.1)
        counting = torch.randint(7, (256, 1), generator=stream(0, "tokens")) - torch.arange(5)
        measure, noise = NextToken(counting % 7), Noise("gaussian")
        return scan(net, measure, noise, points=3, precision=0.5, seed=seed, workers=workers, threads=1)

    one, two, other = once(1), once(2), once(1, seed=2)
    for name, values in one.values.items():
        np.testing.assert_array_equal(values, two.values[name])
    assert one.allocation == two.allocation
    assert not np.array_equal(one.values["loss"], other.values["loss"])
    assert one.rows == one.allocation.draws * one.allocation.rows * 4


def test_what_cannot_be_reached_is_said():
    measure = known_rows(0, 100)
    with pytest.warns(UserWarning, match="its 100 rows are used up; pass about"):
        found = scan(Known(), measure, Noise("gaussian"), points=3, precision=0.01)
    assert found.allocation.limit == "data"
    assert found.allocation.reached > 0.01
    with pytest.warns(UserWarning, match="the budget of 600 rows is spent"):
        found = scan(Known(), known_rows(0), Noise("gaussian"), points=3, precision=0.01, budget=600)
    assert found.allocation.evaluated <= 600


def test_use_that_has_no_meaning_is_refused():
    model, noise = Known(), Noise("gaussian")
    refused("precision: got 0.0", lambda: scan(model, known_rows(0), noise, precision=0.0))
    refused("precision", lambda: scan(model, known_rows(0), Special("self"), precision=0.1))
    refused("choose.indices", lambda: scan(model, lambda net: {"loss": 0.0}, noise, precision=0.1))
    refused("12 rows", lambda: scan(model, known_rows(0, 12), noise, precision=0.1))
    refused("budget", lambda: scan(model, known_rows(0), noise, budget=1000))
    refused("a first look runs", lambda: scan(model, known_rows(0), noise, precision=0.1, budget=100))
    unmean = known_rows(0)
    unmean.__class__ = type("Other", (Rows,), {"__call__": lambda self, net: {"height": 3.0}})
    unmean.choose = lambda rows: unmean
    refused("no such mean", lambda: scan(model, unmean, noise, precision=0.1))
    unknown = known_rows(0)
    unknown.choose, unknown.better = lambda rows: unknown, None
    refused("only height", lambda: scan(model, unknown, noise, precision=0.1))


def test_the_index_is_that_of_the_mean_curve():
    found = scan(Known(), known_rows(5), Noise("gaussian"), points=5, precision=0.1, seed=5)
    expected = index(grid(5, 1.0), found.values["height"].mean(0))
    assert found.asymmetry["height"].value == pytest.approx(expected, abs=1e-12)
