"""Several files in one table: shares of each pass, and every row of a file as often as any other of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.jobs.finetune.state import order, window
from sparing.jobs.lm.labels import IGNORED, Tokens
from sparing.jobs.lm.mixture import Mixture, apportion, joined
from sparing.jobs.lm.packing import pack

sizes = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@given(sizes, st.lists(st.integers(1, 99), min_size=2, max_size=4), st.integers(0, 3))
def test_a_pass_has_its_shares_and_passes_are_even(rows: list[int], shares: list[int], seed: int) -> None:
    shares = (shares * 2)[: len(rows)]
    drawn = apportion(shares, sum(rows))
    assert sum(drawn) == sum(rows)
    assert all(abs(d - sum(rows) * s / sum(shares)) < 1 for d, s in zip(drawn, shares, strict=True))
    mixture = Mixture(tuple(rows), drawn)
    starts = [sum(rows[:at]) for at in range(len(rows))]
    if min(drawn) == 0:
        return
    seen = torch.zeros(sum(rows), dtype=torch.int64)
    for epoch in range(5):
        now = order(sum(rows), seed=seed, epoch=epoch, mixture=mixture)
        assert torch.equal(now, order(sum(rows), seed=seed, epoch=epoch, mixture=mixture))
        seen += torch.bincount(now, minlength=sum(rows))
        for start, size, count in zip(starts, rows, drawn, strict=True):
            times = seen[start : start + size]
            assert times.sum() == count * (epoch + 1)
            assert times.max() - times.min() <= 1


def test_steps_go_through_passes_of_a_mixture() -> None:
    mixture = Mixture((6, 4), (3, 7))
    laid = torch.cat([order(10, seed=1, epoch=epoch, mixture=mixture) for epoch in range(3)])
    steps = [window(step, rows=10, batch=2, accumulate=3, seed=1, mixture=mixture) for step in range(5)]
    assert torch.equal(torch.stack(steps).flatten(), laid)
    assert not torch.equal(laid[:10], laid[10:20])


def tokens(*sizes: int) -> list[Tokens]:
    return [Tokens(list(range(1, size + 1)), list(range(1, size + 1))) for size in sizes]


def test_tables_of_other_widths_are_one() -> None:
    """Packed beside padded rows: what fills a row is learnt by none, and begins a document of its own."""
    first, second = pack(tokens(3, 2), length=6, pad=0), pack(tokens(4), length=6, pad=0, packing=False)
    both = joined([first, second], pad=9)
    assert both.ids.tolist() == [[1, 2, 3, 1, 2, 0], [1, 2, 3, 4, 9, 9]]
    assert both.labels.tolist() == [[IGNORED, 2, 3, IGNORED, 2, IGNORED], [IGNORED, 2, 3, 4, IGNORED, IGNORED]]
    assert both.positions is not None
    assert both.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert both.mixture is None


def test_a_share_that_draws_nothing_is_refused() -> None:
    part = pack(tokens(4), length=6, pad=0, packing=False)
    with pytest.raises(UserError, match=r"mix: got 0\.99 0\.01; a pass of 2 rows draws none of one file"):
        joined([part, part], pad=0, shares=(0.99, 0.01))
