"""Sharing out directions without processes: threads of one process over a store in memory; refusals and losses."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from sparing.errors import RunError, UserError
from sparing.hypergrad.spread import Spread


def shared(ranks: list[int], size: int, count: int, **settings: float) -> list[Tensor]:
    """What each of the ranks that come gets when direction i weighs i."""
    store = HashStore()
    spreads = [Spread(store=store, rank=rank, size=size, **settings) for rank in ranks]

    def one(spread: Spread) -> Tensor:
        return spread.exchange(torch.tensor([float(n) for n in spread.owned(count)], dtype=torch.float64), count)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, spreads))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_rank_gets_every_weight_in_its_place(size: int, count: int) -> None:
    for found in shared(list(range(size)), size, count):
        assert found.tolist() == list(range(count))


def test_a_lost_rank_leaves_holes_and_the_others_agree() -> None:
    for found in shared([0, 2], 3, 7, timeout=0.05):
        assert [math.isnan(weight) for weight in found] == [n % 3 == 1 for n in range(7)]
        assert found[[0, 2, 3, 5, 6]].tolist() == [0, 2, 3, 5, 6]


def test_a_lost_first_rank_is_an_error_in_one_line() -> None:
    with pytest.raises(RunError, match=r"rank 0 did not answer within 0 s") as caught:
        shared([1], 2, 3, timeout=0.05)
    assert "\n" not in str(caught.value)


def test_weights_travel_to_the_last_bit_and_holes_as_holes() -> None:
    store = HashStore()
    weights = torch.tensor([1 / 3, math.nan, math.inf, 1e-300, -math.pi], dtype=torch.float64)
    found = Spread(store=store, rank=0, size=1).exchange(weights, 5)
    torch.testing.assert_close(found, weights, rtol=0, atol=0, equal_nan=True)
    single = torch.tensor([1 / 3], dtype=torch.float32)
    again = Spread(store=store, rank=0, size=1, key="next").exchange(single, 1)
    assert again.dtype == torch.float32
    assert torch.equal(again, single)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank: got {rank}; there are 2; pass 0 <= rank < size"):
        Spread(store=HashStore(), rank=rank, size=2)
