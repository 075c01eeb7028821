"""Local steps in checkpoints: same bits from mid-interval, other groups from an outer step on, a group that dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracles import local_saves
from oracles.local_ranks import apart
from oracles.processes import answers

# slow: four processes three times
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return answers(4, local_saves.square, tmp_path_factory.mktemp("square"))


def test_a_run_goes_on_from_mid_interval_to_the_same_bits_under_any_plan(square: list[dict[str, Any]]) -> None:
    """Another plan adds gradients of two ranks in another order, for three steps: 1e-12 of a weight."""
    for found in (rank["saved"] for rank in square):
        assert found["extra"]
        assert {name: a for name, a in found.items() if name.endswith(("loaded", "bits", "weights")) and a} == {}
        assert max(found["NNN apart"], found["III apart"]) <= 1e-12


def test_the_weights_of_such_a_checkpoint_are_those_of_the_last_outer_step(square: list[dict[str, Any]]) -> None:
    first = local_saves.expected([(2, 2)])[0]
    assert apart({"embed.weight": square[0]["saved"]["anchor"]}, {"embed.weight": first["embed.weight"]}) <= 1e-12


def test_buffers_of_each_group_come_back(square: list[dict[str, Any]]) -> None:
    assert [rank["counting"] for rank in square] == [[[value] * 3] * 2 for value in (1.0, 1.0, 3.0, 3.0)]


def test_an_ordinary_run_goes_on_with_local_steps(square: list[dict[str, Any]]) -> None:
    assert max(rank["turned"] for rank in square) <= 1e-12


def test_checkpoints_that_would_lose_something_are_refused(square: list[dict[str, Any]]) -> None:
    for told in (rank["refused"] for rank in square):
        assert "groups that train alone; each has optimizer state of its own" in told["none"]
        assert "what low-bit wires owe of differences" in told["exact"]
        assert told["wire"] == "nothing was refused"


def test_another_number_of_groups_is_refused_between_outer_steps(square: list[dict[str, Any]]) -> None:
    for told in (rank["refused by four"] for rank in square):
        assert "inner step 1 of 2 groups; each has weights of its own there, and here the number of groups is 4" in told
        assert "save right after an outer step, or start with 2 groups" in told


def test_a_group_that_dies_is_omitted_until_it_comes_back(tmp_path: Path) -> None:
    """Killed in mid-interval; one group goes on from the last outer step, then two, then four of one rank each.

    Sums of up to four numbers in another order, over twelve steps: 1e-12 of a weight.
    """
    told = answers(4, local_saves.killed, tmp_path, lost=(2, 3))
    for words in told[:2]:
        assert "after 6 steps: outer step: ranks of another group are gone" in words
        assert "start again with the groups that are there, from the last checkpoint" in words
    wanted = local_saves.expected([(2, 2), (1, 2), (2, 2), (4, 1)])
    legs = [("three", "six", (2, 1)), ("six", "nine", (2, 2)), ("nine", "twelve", (1, 4))]
    for at, (frm, to, sizes) in enumerate(legs, 1):
        steps = range(3 * at, 3 * at + 3)
        for rank in answers(sizes[0] * sizes[1], local_saves.again, tmp_path, frm, to, sizes, steps):
            assert apart(rank, wanted[at]) <= 1e-12
