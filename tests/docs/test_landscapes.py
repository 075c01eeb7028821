"""Beside Landscaper and loss-landscape-3d: arithmetic by hand, and that all three measure one net."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch


def test_the_largest_error_leaves_out_the_point_that_a_peer_makes_up():
    from benchmarks.valley.landscapes import _beside

    true = np.array([[1.0, 2.0], [4.0, 5.0]])
    assert _beside(true, np.array([[1.0, 2.02], [4.0, 6.0]])) == pytest.approx({"all": 0.2, "rest": 0.01})
    assert _beside(true, None) == {}


def test_ratios_are_geometric_means_of_paired_rounds():
    from benchmarks.valley.landscape_tables import times

    theirs, ours = [2.0, 4.0, 8.0], [1.0, 1.0, 1.0]  # logarithms 1, 2, 3 of base 2: mean 2, deviation 1
    reach = 4.303 / math.sqrt(3)
    low, high = 2 ** (2 - reach), 2 ** (2 + reach)
    assert times(theirs, ours) == f"4.00 [{low:.2f}, {high:.2f}]"


def test_derivatives_are_counted_as_products_and_the_worst_round_is_kept(monkeypatch):
    from benchmarks.valley import landscapes

    @landscapes.contextlib.contextmanager
    def plain():
        yield

    monkeypatch.setattr(landscapes, "quiet", plain)
    monkeypatch.setattr(landscapes, "ROUNDS", 3)
    weight = torch.ones(2, requires_grad=True)

    def run(products: int, *, kept: bool):
        def one(at: int) -> float:
            for _ in range(products + 1 if kept else 2 * products):
                torch.autograd.grad(weight.sum(), weight)
            return float(at)

        return landscapes.Arm(one, kept=kept)

    arms = {"ours": run(5, kept=True), "theirs": run(4, kept=False), "none": run(0, kept=False)}
    found = landscapes.measured(arms, lambda at: {"all": at})["arms"]
    assert {name: row["products"] for name, row in found.items()} == {"ours": 5, "theirs": 4, "none": None}
    assert [row["apart"] for row in found.values()] == 3 * [{"all": 2.0}]  # rounds 0, 1, 2; one before is not counted
    assert [len(row["cpu"]) for row in found.values()] == [3, 3, 3]


def test_all_tools_have_the_same_numbers_on_the_same_points():
    """Errors against float64 of float32 sums over up to 1,000 rows, where a tool tells what it measured."""
    from benchmarks.valley.landscape_tables import rows

    for task in ("line", "plane"):
        arms = rows()[task]["arms"]
        assert {name: arm["apart"]["rest"] < 1e-5 for name, arm in arms.items() if arm["apart"]} == {
            "ours": True, "Landscaper": True, "loss-landscape-3d": True,
        }  # fmt: skip
    assert all(arm["apart"]["all"] < 1e-6 for arm in rows()["trace"]["arms"].values())
    arms = rows()["eigenvalues"]["arms"]
    assert arms["ours"]["apart"]["all"] < 1e-4  # the accuracy that is asked for
    assert min(arms, key=lambda name: arms[name]["apart"]["all"]) == "ours"
