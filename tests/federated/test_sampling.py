"""Blocks that a client does not train: how many, which, and that all have the same chance."""

from __future__ import annotations

import pytest

from federated import worlds
from sparing.errors import UserError
from sparing.federated.client.train import ClientSetup, client_setup, frozen_names
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.settings import Schedule


def setup_of(blocks: int | None, seed: int = 0) -> ClientSetup:
    return client_setup(worlds.deep(), FedAvg(), Schedule(blocks=blocks), seed=seed)


@pytest.mark.parametrize("blocks", [0, 1, 3, 4])
def test_whole_blocks_are_drawn(blocks):
    setup = setup_of(blocks, seed=1)
    assert setup.body == tuple((f"{at}.weight", f"{at}.bias") for at in (1, 2, 3, 4))
    rest = frozen_names(setup, 2, 5)
    assert len(rest) == 2 * (4 - blocks)
    assert all({f"{at}.weight" in rest, f"{at}.bias" in rest} in ({True}, {False}) for at in (1, 2, 3, 4))
    assert rest == frozen_names(setup_of(blocks, seed=1), 2, 5)


def test_without_blocks_all_train():
    assert setup_of(None).body == ()
    assert frozen_names(setup_of(None), 0, 0) == frozenset()


def test_every_block_has_the_same_chance():
    counts, setup = dict.fromkeys(range(1, 5), 0), setup_of(1)
    for number in range(20):
        for client in range(20):
            rest = frozen_names(setup, number, client)
            counts[next(at for at in counts if f"{at}.weight" not in rest)] += 1
    assert all(abs(count - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for count in counts.values())  # four deviations


def test_too_many_blocks():
    with pytest.raises(UserError, match="the body has 4 blocks"):
        setup_of(5)
