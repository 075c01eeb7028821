"""What a rank reads, and what all agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.processes import answers
from sparing.errors import UserError
from sparing.jobs.ranks import Ranks, micro_steps
from sparing.sharding.network.mesh import make_mesh


def ranks_of(world: int) -> list[Ranks]:
    """All ranks, which share rows without sending anything."""
    meshes: list[Any] = [SimpleNamespace(rank=rank, world=world) for rank in range(world)]
    return [Ranks(mesh) for mesh in meshes]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7))
def test_every_row_is_read_once_and_no_rank_holds_more_than_one_process_would(accumulate: int, batch: int, world: int):
    rows = torch.arange(accumulate * batch).view(accumulate, batch)
    parts = [ranks.share(rows) for ranks in ranks_of(world)]
    assert sorted(row for part in parts for micro in part for row in micro.tolist()) == rows.flatten().tolist()
    assert {len(part) for part in parts} == {micro_steps(accumulate, world)}
    assert max(len(micro) for part in parts for micro in part) <= batch


def test_one_process_reads_the_rows_as_they_are():
    rows = torch.arange(6).view(3, 2)
    assert [micro.tolist() for micro in Ranks().share(rows)] == rows.tolist()


def test_one_process_asks_nobody():
    for ranks in (Ranks(), *ranks_of(1)):
        assert (ranks.first, ranks.several, ranks.seed_labels, ranks.sum(1.5)) == (True, False, (), 1.5)
        assert ranks.agree_to_stop([15]) == [15]
        with pytest.raises(ZeroDivisionError):  # as it was raised, in words of its own
            ranks.on_first_rank(lambda: 1 / 0)


def agreed() -> tuple[float, list[int], list[int], str]:
    with make_mesh(groups=1) as mesh:
        ranks = Ranks(mesh)
        found = ranks.sum(1.5 + ranks.rank), ranks.agree_to_stop([15] * ranks.rank), ranks.agree_to_stop([])
        try:
            ranks.check_same({"rank": ranks.rank})
        except UserError as error:
            return (*found, str(error))
    return (*found, "")


@pytest.mark.processes
def test_ranks_agree() -> None:
    first, second = answers(2, agreed)
    assert first == second
    assert first[:3] == (4.0, [1], [])
    assert "rank 0 on rank 0, 1 on rank 1" in first[3]
