"""What a stated precision costs in rows, whether it is reached, and how often the intervals hold the truth.

Laws with known variances, and a trained net: rises of every test row along many draws are measured once, and their mean
is the truth for draws and rows sampled from them. Beside our split stand as many rows as draws, every draw on as many
rows as there are, and the split by the true variances without a first look.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.valley.coverage import digits_net
from benchmarks.valley.store import Store
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import Noise
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans.allocation import DRAWS, Costs, components, rows_of_a_draw, spend, standard_errors
from sparing.valley.scans.asymmetry import mean_rises, signed_ratio
from sparing.valley.scans.batch_norm import Refresher
from sparing.valley.scans.intervals import ratio_interval
from sparing.valley.scans.points import grid
from sparing.valley.scans.precise import MOVE

Floats = NDArray[np.float64]
Measure = Callable[[range, int], Floats]

ASKED = (0.05, 0.02)
"""Standard errors."""
SEEDS, POPULATION, POINTS, CALIBRATION, MOST = 200, 200, 7, 256, 597
"""Scans of a case, draws around the net, points of a curve, calibration rows, rows of the plain way."""
PLENTY = 10**7

# Means of the rises, deviations between draws and between rows of a draw, calibration rows
LAWS = {
    "draws and rows vary alike": ((1.0, 0.6), 0.4, 0.4, 0),
    "rows vary more": ((1.0, 0.6), 0.1, 1.0, 0),
    "rows vary more, batch norm": ((1.0, 0.6), 0.1, 1.0, 512),
    "draws vary more": ((1.0, 0.6), 0.4, 0.1, 0),
    "one side hardly rises": ((1.0, 0.05), 0.2, 0.8, 0),
}


def of_law(rng: np.random.Generator, means: tuple[float, float], between: float, within: float) -> Measure:
    """Normal rises."""
    known: dict[int, Floats] = {}

    def measure(draws: range, rows: int) -> Floats:
        for draw in draws:
            known.setdefault(draw, between * rng.normal(size=2))
        found = [known[draw] + within * rng.normal(size=(rows, 2)) for draw in draws]
        return (np.array(means) + np.array(found))[:, :, None]

    return measure


@functools.cache
def population(sign: str) -> Floats:
    """Rises of every test row along every draw around the net of digits, shape (draws, rows, 2, 2): error and loss."""
    net, measure, calibration = digits_net()
    at, found = grid(POINTS, 1.0), []
    refresher = Refresher(net, [calibration])
    with perturbing(net) as perturber:
        net.eval()
        for draw in range(POPULATION):
            perturber.to({}, 0.0)
            vector = direction_of(Noise("gaussian", sign=sign), net, seed=1, draw=draw).vector  # type: ignore[arg-type]
            values = []
            for step in at:
                perturber.to(vector, float(step))
                with refresher.at_point(), torch.no_grad():
                    each = measure.each(net)
                values.append(np.stack([np.asarray(each[name]) for name in ("error", "loss")]))
            rises = mean_rises(at, np.moveaxis(np.array(values), 0, 2))
            found.append(np.stack(rises, 2).transpose(1, 0, 2))
    return np.array(found)


def of_net(rng: np.random.Generator, sign: str) -> Measure:
    """Draws and rows of the net, rows with replacement."""
    every, known = population(sign), dict[int, int]()

    def measure(draws: range, rows: int) -> Floats:
        found = []
        for draw in draws:
            at = known.setdefault(draw, int(rng.integers(len(every))))
            found.append(every[at, rng.integers(every.shape[1], size=rows)])
        return np.array(found)

    return measure


def cases() -> Iterator[tuple[str, Callable[[np.random.Generator], Measure], Floats, tuple[Floats, Floats], Costs]]:
    """Name, what makes a sampler, true mean rises (K, 2), true components, costs."""
    for name, (means, between, within, calibration) in LAWS.items():
        truth = np.array([means])
        slope = 2 * math.hypot(*means) / sum(means) ** 2
        true = (np.array([(slope * between) ** 2]), np.array([(slope * within) ** 2]))
        costs = Costs(points=POINTS, calibration=calibration, move=MOVE, available=PLENTY)
        yield name, functools.partial(of_law, means=means, between=between, within=within), truth, true, costs
    for sign in ("raw", "consistent"):
        every = population(sign)
        costs = Costs(points=POINTS, calibration=CALIBRATION, move=MOVE, available=PLENTY)
        yield (
            f"digits net, {sign} noise", functools.partial(of_net, sign=sign), every.mean((0, 1)), components(every),
            costs,
        )  # fmt: skip


def _grown(measure: Measure, asked: float, costs: Costs, rows: int | None) -> int:
    """Rows run until the error is as asked: so many rows of each draw, or as many as draws."""
    n = DRAWS
    pairs = measure(range(n), rows or n)
    while standard_errors(pairs.mean(1)).max() > asked:
        more = max(n // 16, 1)
        if rows is None:
            pairs = np.concatenate([pairs, measure(range(n), more)], 1)
        pairs = np.concatenate([pairs, measure(range(n, n + more), rows or n + more)], 0)
        n += more
    return costs.rows(n, rows or n)


def _row(name: str, make: Any, truth: Floats, true: tuple[Floats, Floats], costs: Costs, asked: float) -> Any:
    index = signed_ratio(truth[:, 0], truth[:, 1])
    best = rows_of_a_draw(*true, asked, costs, least=(DRAWS, 2))
    misses, told, held, ours, draws, rows = [], [], [], [], [], []
    others: dict[str, list[int]] = {"equal": [], "all": [], "known": []}
    for seed in range(SEEDS):
        found = spend(make(np.random.default_rng(seed)), asked, costs)
        means = found.pairs.mean((0, 1))
        misses.append(signed_ratio(means[:, 0], means[:, 1]) - index)
        ends = [ratio_interval(found.pairs.mean(1)[:, k]) for k in range(len(index))]
        held += [low <= value <= high for (low, high), value in zip(ends, index, strict=True)]
        told.append(found.errors.max())
        ours.append(found.evaluated)
        draws.append(len(found.pairs))
        rows.append(found.pairs.shape[1])
        if seed < SEEDS // 10:
            for key, count in (("equal", None), ("all", MOST), ("known", best)):
                others[key].append(_grown(make(np.random.default_rng(seed)), asked, costs, count))
    return {
        "case": name, "asked": asked, "scans": SEEDS, "told": np.mean(told), "held": np.mean(held),
        # of the index that is known worst
        "deviation": float(np.sqrt(np.mean(np.square(misses), 0)).max()), "index": list(index),
        "between": list(true[0]), "within": list(true[1]), "draws": np.mean(draws), "rows": np.mean(rows),
        "run": np.mean(ours), **{f"run_{key}": np.mean(each) for key, each in others.items()},
    }  # fmt: skip


def precision() -> None:
    """Every case at both errors."""
    store = Store("precision")
    for case in cases():
        for asked in ASKED:
            store.once(f"{case[0]} {asked}", functools.partial(_row, *case, asked))
