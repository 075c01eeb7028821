"""Directions over two real processes equal those of one; a rank that never comes is left out; only scalars travel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oracles import hypergrad_ranks
from oracles.problems import dropout
from oracles.processes import answers
from sparing import hypergrad as hg
from sparing.hypergrad.forward_mode.sampled import draw_directions
from sparing.seeds import number

# slow: two processes, once for all tests
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of two processes for all tests: starting them is what costs."""
    return answers(hypergrad_ranks.WORLD, hypergrad_ranks.work, tmp_path_factory.mktemp("ranks"))


def close(found: Any, expected: Any) -> None:
    """Other groups of directions in one product round apart by 1e-16."""
    if expected is None:
        assert found is None
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("name", hypergrad_ranks.METHODS)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], name: str, store: str) -> None:
    one = hypergrad_ranks.told(hypergrad_ranks.METHODS[name])
    for answer in ranks:
        for field, expected in one.items():
            close(answer[f"{store} {name}"][field], expected)


@pytest.mark.parametrize("name", hypergrad_ranks.METHODS)
def test_both_processes_end_with_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][f"tcp {name}"] == ranks[1][f"tcp {name}"]


def test_a_rank_that_never_comes_is_left_out_and_told(ranks: list[dict[str, Any]]) -> None:
    """Of five directions over three ranks the third owns number 2; the mean is over the other four."""
    case = dropout()
    whole = hg.hypergradient(case.problem, case.phi, hg.ForwardGradient(directions=5), seed=7)
    rows = draw_directions(hg.Rademacher(), 5, case.phi, number(7, "directions")).rows(range(5))
    kept = [0, 1, 3, 4]
    expected = whole.report.weights[kept] @ rows[kept] / 4
    for answer in ranks:
        close(answer["lost"]["grad"], expected.tolist())
        assert answer["lost"]["masked"] == 1
        assert [math.isnan(weight) for weight in answer["lost"]["weights"]] == [False, False, True, False, False]
        assert any("1 of 5 directions" in words for words in answer["lost"]["warned"])


def test_only_scalars_travel(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 leaves two weights; rank 0 three, and the answer of five: about twenty characters each."""
    assert ranks[1]["sent"] <= 2 * 26
    assert ranks[0]["sent"] <= (3 + 5) * 26
