"""Rings plugged into ``fully_shard`` give the bits of its own collectives, and leave while backward goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracles import fsdp_ranks
from oracles.processes import answers
from sparing.sharding.fsdp.collectives import nested, ranked

# slow: four processes
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return answers(4, fsdp_ranks.experiment)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 1), (1, 4), (4,)])
def test_orders_are_inverse_and_nest(sizes: tuple[int, ...]) -> None:
    world = torch.Size(sizes).numel()
    pieces = torch.arange(2 * world)
    there = nested(pieces, sizes)
    assert torch.equal(ranked(there, sizes), pieces)
    if len(sizes) == 2:  # rank i·m + j lies at place j·g + i
        m, g = sizes
        for i in range(g):
            for j in range(m):
                assert torch.equal(there.view(world, 2)[j * g + i], pieces.view(world, 2)[i * m + j])


@pytest.mark.parametrize("over", ["intra", "world"])
def test_gradients_are_those_of_the_librarys_collectives(found: list[dict[str, Any]], over: str) -> None:
    assert all(rank[over]["equal"] for rank in found)


def test_rings_count_what_torch_sends_through_them(found: list[dict[str, Any]]) -> None:
    """8 B numbers of three layers (32, 45, 18 and rows of padding): gathered twice, reduced once, over rings of 2."""
    # over two ranks of a group: rows are padded to even numbers: 8·4, 6·9, 4·6
    half = 8 * (32 + 54 + 24) // 2
    assert found[0]["intra"]["sent"] == {"intra": 3 * half, "inter": 0}
    # over four: 8·4, 8·9, 4·6; first quarters between groups, then halves inside
    whole = 8 * (32 + 72 + 24)
    assert found[0]["world"]["sent"] == {"intra": 3 * whole // 2, "inter": 3 * whole // 4}


def test_backward_returns_while_reductions_are_under_way(found: list[dict[str, Any]]) -> None:
    assert all(rank["early"] == {"early": True, "filled": True} for rank in found)
