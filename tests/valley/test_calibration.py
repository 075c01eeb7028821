"""The fit against brute force, and its file."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from refusals import refused
from sparing.valley.forecast import calibration
from sparing.valley.forecast.calibration import (
    METRICS,
    SCORE,
    Pair,
    fit,
    ranks,
    read,
    spearman,
    unimodal_fit,
    write,
)


def numbers(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n)


def pairs(n: int, gap, *, noise: float = 0.0) -> list[Pair]:
    """Pairs whose gap is a function of their first feature; the second is noise."""
    one, other, errors = np.linspace(0, 1, n), numbers(n, 1), noise * numbers(n, 2)
    return [
        Pair(
            name=f"pair {at}",
            features={"x": float(one[at]), "y": float(other[at])},
            gap={metric: float(gap(one[at]) + errors[at]) for metric in METRICS},
        )
        for at in range(n)
    ]


def brute(values: np.ndarray) -> float:
    """Least squared error of a sequence that falls and then rises, over all cuts into runs of equal value."""
    best = math.inf
    for cuts in itertools.product([False, True], repeat=len(values) - 1):
        runs = np.split(values, [at + 1 for at, cut in enumerate(cuts) if cut])
        means = [run.mean() for run in runs]
        low = int(np.argmin(means))
        if means[: low + 1] == sorted(means[: low + 1], reverse=True) and means[low:] == sorted(means[low:]):
            best = min(best, sum(float(((run - run.mean()) ** 2).sum()) for run in runs))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_valley_is_the_closest_of_all(seed: int):
    values = numbers(9, seed)
    found = unimodal_fit(values)
    low = int(found.argmin())
    assert (np.diff(found[: low + 1]) <= 1e-15).all()
    assert (np.diff(found[low:]) >= -1e-15).all()
    assert float(((found - values) ** 2).sum()) == pytest.approx(brute(values), rel=1e-10)


def test_ranks_and_their_correlation():
    assert ranks(np.array([5.0, 1.0, 5.0, 9.0, 0.0])).tolist() == [0.625, 0.25, 0.625, 1.0, 0.0]
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == 1.0
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0
    # d = (0, 1, −1, 0): 1 − 6 · 2 / (4 · 15) = 0.8
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert math.isnan(spearman([1, 1], [1, 2]))


def test_a_rising_gap_is_found_and_ranked():
    found = fit(pairs(40, lambda x: x**3), ("x", "y"))
    scores = [found.score({"x": float(x), "y": 0.0}) for x in np.linspace(0, 1, 20)]
    gaps = [found.gap("loss", score) for score in scores]
    assert found.weights[0] > 0
    assert spearman(gaps, np.linspace(0, 1, 20).tolist()) == pytest.approx(1.0)


def test_exact_gaps_are_met():
    """One feature and no noise: at the pairs the fit is the measurement, but for the slope that keeps ranks."""
    measured = pairs(21, lambda x: x)
    found = fit(measured, ("x",))
    for pair in measured:
        assert found.gap("error", found.score(pair.features)) == pytest.approx(pair.gap["error"], abs=2e-3)


def test_weights_are_never_negative():
    """The second feature is the first, negated: plain least squares might use it with a weight below zero."""
    measured = [
        Pair(name=pair.name, features={"x": pair.features["x"], "z": -pair.features["x"] + 0.1 * pair.features["y"]},
             gap=pair.gap)
        for pair in pairs(30, lambda x: x)
    ]  # fmt: skip
    assert min(fit(measured, ("x", "z")).weights) >= 0
    assert fit(measured, ("z",)).weights[0] >= 0


def test_weights_are_those_of_non_negative_least_squares():
    from scipy.optimize import nnls

    x, y = np.random.default_rng(3).normal(size=(40, 4)), numbers(40, 4)
    target = ranks(y)
    expected = nnls(x - x.mean(0), target - target.mean())[0]
    np.testing.assert_allclose(calibration._nonnegative_weights(x, y), expected, rtol=1e-9, atol=1e-12)


def test_intervals_hold_the_share_they_promise():
    """Of 400 further pairs nine in ten, give or take: 80 calibrated pairs and local ranks leave a few per cent."""
    found = fit(pairs(80, lambda x: x * x, noise=0.1), ("x",))
    xs, errors = np.random.default_rng(8).uniform(size=400), 0.1 * numbers(400, 9)
    hits = 0
    for x, error in zip(xs, errors, strict=True):
        low, high = found.interval("error", found.score({"x": float(x)}))
        hits += low <= x * x + error <= high
    assert 0.84 <= hits / 400 <= 0.97


def test_pairs_that_lack_a_feature_are_left_out():
    measured = pairs(20, lambda x: x)
    torn = [Pair(name="torn", features={"x": math.nan}, gap=measured[0].gap)] * 5
    assert len(fit([*measured, *torn], ("x",)).scores) == 20
    refused("7 usable pairs", fit, measured[:7], ("x",))


def test_file_keeps_the_pairs(tmp_path: Path):
    measured = [*pairs(3, lambda x: x), Pair(name="β", features={"x": math.nan, "y": 1.0}, gap={"loss": 0.5})]
    write(tmp_path / "some.json", measured, source="a test")
    again = read(tmp_path / "some.json")
    assert [pair.name for pair in again] == ["pair 0", "pair 1", "pair 2", "β"]
    assert again[1].features == pytest.approx(measured[1].features, abs=1e-6)  # six decimals are written
    assert again[3].features == {"y": 1.0}
    assert json.loads((tmp_path / "some.json").read_text("utf-8"))["source"] == "a test"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "sparing.valley.calibration", "version": 1}'])
def test_torn_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "some.json").write_text(text)
    refused(r"some\.json; it cannot be read", read, tmp_path / "some.json")


def test_other_versions_are_refused(tmp_path: Path):
    write(tmp_path / "some.json", pairs(3, lambda x: x), source="a test")
    text = (tmp_path / "some.json").read_text("utf-8").replace('"version": 1', '"version": 2')
    (tmp_path / "some.json").write_text(text)
    refused("this version reads", read, tmp_path / "some.json")
    refused("cannot be read", read, tmp_path / "missing.json")


def test_shipped_pairs_can_be_fitted():
    """Whatever was measured last: names are unique, features known, and strangers score above the closest pairs."""
    measured = read()
    assert len({pair.name for pair in measured}) == len(measured) >= 40
    found = calibration.shipped_fit(SCORE)
    assert found is not None
    assert max(found.weights) > 0
    assert found.scores[-1] > found.scores[0]


def test_gaps_keep_their_rank_beyond_the_pairs():
    found = fit(pairs(30, lambda x: x), ("x",))
    top = found.scores[-1]
    assert found.gap("error", top + 1) > found.gap("error", top + 0.5) > found.gap("error", top)
