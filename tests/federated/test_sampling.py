"""Blocks that a client leaves alone: how many, which, and that all have the same chance."""

from __future__ import annotations

import pytest

from federated import worlds
from sparing.errors import UserError
from sparing.federated.sampling import body_params, frozen_names
from sparing.federated.settings import Schedule

BODY = body_params(worlds.deep(), Schedule(blocks=1))


def test_body():
    assert tuple((f"{at}.weight", f"{at}.bias") for at in (1, 2, 3, 4)) == BODY
    assert body_params(worlds.deep(), Schedule()) == ()
    assert frozen_names((), Schedule(), 0, 0, 0) == frozenset()


@pytest.mark.parametrize("blocks", [0, 1, 3, 4])
def test_all_but_the_drawn_blocks_rest(blocks):
    rest = frozen_names(BODY, Schedule(blocks=blocks), 2, 5, 1)
    assert len(rest) == 2 * (4 - blocks)
    assert all({f"{at}.weight" in rest, f"{at}.bias" in rest} in ({True}, {False}) for at in (1, 2, 3, 4))
    assert rest == frozen_names(BODY, Schedule(blocks=blocks), 2, 5, 1)


def test_every_block_has_the_same_chance():
    counts = dict.fromkeys(range(1, 5), 0)
    for number in range(20):
        for client in range(20):
            rest = frozen_names(BODY, Schedule(blocks=1), number, client, 0)
            counts[next(at for at in counts if f"{at}.weight" not in rest)] += 1
    assert all(abs(count - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for count in counts.values())  # four deviations


def test_too_many_blocks():
    with pytest.raises(UserError, match="the body has 4 blocks"):
        body_params(worlds.deep(), Schedule(blocks=5))
