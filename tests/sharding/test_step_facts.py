"""Ranks that are not at the same place in a step hear of it, all of them."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.sharding.step_facts import _require_same_place

HERE = [1, 40, 7]
"""Backward passes, collectives, and a number that their order makes."""


def test_ranks_at_one_place_go_on() -> None:
    _require_same_place([HERE] * 4)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([0, 12, 3], r"\(1, 40, 7\) on ranks 0, 1, 3, \(0, 12, 3\) on rank 2; .*; run the same blocks"),
        ([1, 40, 8], r"\(1, 40, 8\) on rank 2; "),
    ],
    ids=["a pass is missing", "in another order"],
)
def test_a_rank_elsewhere_is_named(there: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _require_same_place([HERE, HERE, there, HERE])
