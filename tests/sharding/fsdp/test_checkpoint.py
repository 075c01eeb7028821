"""A checkpoint of one engine is one of the other: under other plans, on fewer ranks, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracles import checkpoint_engines
from oracles.checkpoint_engines import CURVED, WAYS
from oracles.processes import answers

# slow: six processes, forked from one that has imported torch
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return answers(4, checkpoint_engines.square, folder)


@pytest.mark.parametrize("way", WAYS)
def test_exact_sums_go_on_in_the_bits_of_plain_training(found: list[dict[str, Any]], way: str) -> None:
    """Momenta too: a second step needs them."""
    assert [rank[way] for rank in found] == [[]] * 4


@pytest.mark.parametrize("what", CURVED)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_taken_over_goes_on_as_the_one_that_never_stopped(
    found: list[dict[str, Any]], way: str, what: str
) -> None:
    """Weights in the same bits; two steps later apart by no more than sums in another order."""
    assert max(rank[f"{way}, {what}"] for rank in found) <= 1e-12


@pytest.mark.parametrize("to", ["sparing", "fsdp2"])
def test_what_rested_rests_and_thaws_with_fresh_state(found: list[dict[str, Any]], to: str) -> None:
    for rank in found:
        assert rank[f"rested {to}"]["apart"] <= 1e-12
        assert "call engine.freeze for its block" in rank[f"rested {to}"]["by flag"]


def test_two_ranks_go_on_where_four_stopped(found: list[dict[str, Any]], folder: Path) -> None:
    del found
    assert answers(2, checkpoint_engines.pair, folder) == [[], []]
