"""How often the 95 % interval of an asymmetry index holds the truth, by number of noise draws.

Rises (N, P) of a draw come from laws whose truth is known, and from 1,500 draws along Gaussian noise around a trained
net, whose mean is the truth for samples drawn from them. Beside Fieller's interval stands a bootstrap over draws with
its percentiles moved outwards, as it was used before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from benchmarks.valley.store import Store
from sparing.seeds import stream
from sparing.valley.directions.config import Noise
from sparing.valley.scans.asymmetry import mean_rises, signed_ratio
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.intervals import ratio_interval, student_t_quantile
from sparing.valley.scans.scan import scan

Floats = NDArray[np.float64]
Drawn = Callable[[np.random.Generator, int], Floats]
"""Generator and n -> rises, shape (n, 2)."""

COUNTS = (2, 3, 4, 5, 8, 10, 20)
"""Noise draws behind an interval."""
SAMPLES, OLD_SAMPLES, RESAMPLES, POPULATION = 4000, 1000, 1000, 1500
"""Intervals of Fieller's and of the bootstrap, its resamples, and draws around the net."""

LAWS: dict[str, tuple[tuple[float, float], Drawn]] = {
    "normal, 30 % scatter": ((1.0, 0.5), lambda rng, n: np.array([1.0, 0.5]) + 0.3 * rng.normal(size=(n, 2))),
    "normal, 100 % scatter": ((1.0, 0.5), lambda rng, n: np.array([1.0, 0.5]) + rng.normal(size=(n, 2))),
    "normal, one flat side": (
        (1.0, 0.02), lambda rng, n: np.array([1.0, 0.02]) + rng.normal(size=(n, 2)) * [0.3, 0.01]
    ),
    "exponential": ((1.0, 0.5), lambda rng, n: rng.exponential(size=(n, 2)) * [1.0, 0.5]),
    "lognormal, σ = 0.8": (
        (math.exp(0.32), math.exp(0.32) / 2), lambda rng, n: np.exp(0.8 * rng.normal(size=(n, 2))) * [1.0, 0.5]
    ),
}  # fmt: skip
"""Means of N and P, and how they are drawn."""


@functools.cache
def digits_net() -> tuple[nn.Module, Classification, torch.Tensor]:
    """A net of digits with batch norm, trained from seed 0, what it is measured on, and calibration rows."""
    data = load_digits()
    inputs, classes = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(classes), generator=stream(0, "coverage"))
    train, test = order[:1200], order[1200:]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for epoch in range(15):
        rows = train[torch.randperm(len(train), generator=stream(0, "coverage", epoch))]
        for part in rows.split(64):
            optimizer.zero_grad()
            functional.cross_entropy(net(inputs[part]), classes[part]).backward()
            optimizer.step()
    return net.eval(), Classification(inputs[test], classes[test]), inputs[train[:256]]


@functools.cache
def _scanned(sign: str) -> dict[str, Floats]:
    """Metric -> rises of every draw around that net."""
    net, measure, calibration = digits_net()
    found = scan(
        net, measure, Noise("gaussian", sign=sign),  # type: ignore[arg-type]
        calibrate=[calibration], points=7, draws=POPULATION, seed=0,
    )  # fmt: skip
    return {metric: np.stack(mean_rises(found.lambdas, values), 1) for metric, values in found.values.items()}


def _of_net(sign: str, metric: str) -> tuple[tuple[float, float], Drawn]:
    every = _scanned(sign)[metric]
    return tuple(every.mean(0)), lambda rng, n: every[rng.choice(len(every), n, replace=False)]


def _bootstrapped(pairs: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """Percentiles of resampled means at levels moved outwards (Hesterberg 2015, section 5.3)."""
    n = len(pairs)
    means = pairs[rng.integers(n, size=(RESAMPLES, n))].mean(1)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_t_quantile(0.975, n - 1))
    low, high = np.quantile(signed_ratio(means[:, 0], means[:, 1]), [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def measured(mean: tuple[float, float], drawn: Drawn, n: int) -> dict[str, Any]:
    """Share of intervals that hold the truth, and their mean length."""
    truth = float(signed_ratio(np.array(mean[0]), np.array(mean[1])))
    rng = np.random.default_rng(n)
    ends = np.array([ratio_interval(drawn(rng, n)) for _ in range(SAMPLES)])
    old = np.array([_bootstrapped(drawn(rng, n), rng) for _ in range(OLD_SAMPLES)])

    def held(found: Floats) -> float:
        # an end that meets a truth of exactly ±1 may miss it by rounding
        return float(((found[:, 0] <= truth + 1e-12) & (truth - 1e-12 <= found[:, 1])).mean())

    whole = float(((ends[:, 0] == -1) & (ends[:, 1] == 1)).mean())
    length = float((ends[:, 1] - ends[:, 0]).mean())
    return {"truth": truth, "held": held(ends), "length": length, "whole": whole, "bootstrap": held(old)}


def coverage() -> None:
    """Every law and both kinds of noise around the net, at every number of draws."""
    store = Store("coverage")
    cases = {name: lambda name=name: LAWS[name] for name in LAWS}
    cases |= {
        f"digits net, {sign} noise, {metric}": lambda sign=sign, metric=metric: _of_net(sign, metric)
        for sign in ("raw", "consistent") for metric in ("error", "loss")
    }  # fmt: skip
    for name, case in cases.items():
        for n in COUNTS:
            store.once(f"{name} {n}", lambda case=case, n=n, name=name: {"case": name, "n": n} | measured(*case(), n))
