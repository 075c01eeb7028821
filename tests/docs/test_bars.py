"""How choices of a planner are judged: regrets, clear pairs, intervals and left-out fits against hand-made numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def plans(rounds: dict[str, tuple[float, ...]], predicted: dict[str, float]):
    """Plans of the reference cell, with medians of three rounds."""
    from benchmarks.network.bars import Measured
    from benchmarks.network.cells import REFERENCE
    from benchmarks.network.predictions import nominal, workload

    from sparing.sharding.planner.prediction import predict

    prices = {name: predict(workload(REFERENCE, None), nominal(REFERENCE), name) for name in rounds}
    return [
        Measured(prices[name].plan, sorted(turns)[1], turns, predicted[name], prices[name])
        for name, turns in rounds.items()
    ]


def test_regrets_of_a_choice_by_hand():
    """NNN leads in rounds 1 and 2 and by medians; the planner takes NNG, the rule NNN."""
    from benchmarks.network.bars import PLANNER, RULE, regrets

    fit = plans({"NNN": (1.0, 1.0, 3.0), "NNG": (2.0, 1.5, 1.0)}, {"NNN": 2.0, "NNG": 1.0})
    found, lost, lost_by_others = regrets(fit)
    assert found[PLANNER].medians == 1.5 / 1.0 - 1
    assert found[RULE].medians == 0
    assert found["a plan at random"].medians == 1.25 - 1
    # medians of the others: without round 1 NNN 2, NNG 1.25; without 2 NNN 2, NNG 1.5; without 3 NNN 1, NNG 1.75
    assert found[PLANNER].fresh == (0.0, 0.0, 1 / 3 - 1)
    assert found[RULE].fresh == (1 / 2 - 1, 1 / 1.5 - 1, 0.0)
    assert not lost
    assert lost_by_others == (True, True, False)


def test_memories_are_the_peaks_and_exclude_what_is_larger():
    from benchmarks.network.bars import memories

    names = ("NNN", "NNG", "GGG")
    fits = memories(plans(dict.fromkeys(names, (1.0, 1.0, 1.0)), dict.fromkeys(names, 1.0)))
    assert [[one.plan.name for one in fit] for fit in fits] == [["GGG"], ["NNG", "GGG"], ["NNN", "NNG", "GGG"]]


def test_clear_pairs_have_disjoint_rounds():
    from benchmarks.network.bars import clear

    rounds = {"NNN": (1.0, 1.1, 1.2), "NNG": (1.15, 1.3, 1.4), "GGG": (2.0, 2.1, 2.2)}
    found = plans(rounds, {"NNN": 1.0, "NNG": 3.0, "GGG": 2.0})
    assert clear(found, lambda one: one.predicted) == (1, 2)
    assert clear(found, lambda one: one.seconds) == (2, 2)
    assert clear(found, lambda one: one.predicted, least=4) == (0, 0)


def test_an_interval_holds_the_mean_of_whole_cells():
    """Against the standard error of a ratio of equal cells, which a bootstrap of 400 of them must match within 10 %."""
    from benchmarks.network.bars import Ratio

    values = np.random.default_rng(1).normal(1.0, 1.0, 400)
    found = Ratio((4 * value, 4) for value in values)
    assert found.value == pytest.approx(values.mean(), rel=1e-12)
    low, high = np.percentile(found.drawn, [2.5, 97.5])
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 400**0.5, rel=0.1)
    assert found.text(found) == "0.0 % [0.0, 0.0]"
    assert found.text(found, times=True) == "1.00× [1.00, 1.00]"


def test_a_left_out_fit_finds_costs_that_are_there():
    from benchmarks.network.bars import _counts, left_out
    from benchmarks.network.cells import REFERENCE

    names, costs = ("NNN", "NII", "GGG"), np.array([1e-3, 0.0, 0.25])
    cells = {}
    for accumulate in (1, 4, 10):
        cell = replace(REFERENCE, accumulate=accumulate)
        bare = plans(dict.fromkeys(names, (1.0, 1.0, 1.0)), dict.fromkeys(names, 1.0))
        cells[cell] = [replace(one, seconds=1 + float(_counts(cell, one) @ costs)) for one in bare]
    for cell, found in left_out(cells).items():
        told = [one.predicted for one in found]
        assert told == pytest.approx([one.seconds for one in cells[cell]], rel=1e-9)


def test_no_fitted_cost_is_below_zero():
    from benchmarks.network.bars import positive

    counts = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert positive(counts, counts @ np.array([2.0, 3.0])) == pytest.approx([2.0, 3.0])
    # the second would be negative: without it, least squares of the first alone
    assert positive(counts, np.array([1.0, -3.0, 0.0])) == pytest.approx([0.5, 0.0])
