"""Honest clients that lie far from the others: nobody is left out, and the model is that of a run without the guard."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from idioms.federated.cells import UNEVEN
from idioms.federated.worlds import METHOD, SCHEDULE, client, normed, require_same
from sparing.federated import flower, simulate
from sparing.federated.server.faults import Guard

PLAN = replace(SCHEDULE, local_epochs=1, weights="size")
HUNDREDFOLD = [client(rows, at) for at, rows in enumerate([8] * 6 + [800])]
LOPSIDED = [client(rows, at) for at, rows in enumerate([8] * 5 + [200] * 4)]


class Seen(nn.Module):
    """Counts the steps that saw a large number: none but one client has any."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("seen", torch.zeros(3).double())

    def forward(self, x):
        if self.training:
            self.seen += (x[:, 0] > 5.0).any()
        return self.layer(x)


def rare():
    clients = [client(8, at) for at in range(6)]
    clients[2].inputs[:4, 0] = 10.0
    return clients


def require_all(make, clients, method, plan, seed=4):
    run, free = (
        simulate(make, clients, METHOD[method], plan, seed=seed, engine="loop", members=False, guard=guard)
        for guard in (None, Guard(huge=None))
    )
    assert [row["left_out"] for row in run.record] == [""] * plan.rounds
    require_same(run.params, free.params)
    require_same(run.buffers, free.buffers)
    return run


def hundredfold(method):
    require_all(normed, HUNDREDFOLD, method, PLAN)


def lopsided(method):
    require_all(normed, LOPSIDED, method, PLAN)


def one_mover():
    # It travels as a float, so it is averaged: one or two steps of one client of six, in two rounds.
    run = require_all(Seen, rare(), "FedAvg", SCHEDULE)
    assert run.buffers["seen"].max() > 0


def seldom_drawn():
    # Who was away for rounds has counted fewer batches than the server's model: by far more than others made now.
    plan = replace(SCHEDULE, rounds=80, participation=0.1, local_epochs=1, batch_size=8, batch_norm="local")
    require_all(normed, [client(8, at) for at in range(40)], "FedAvg", plan, seed=0)


def on_flower():
    pytest.importorskip("flwr", reason="needs the extra [flower]")
    run = flower.run_in_process(normed, HUNDREDFOLD, METHOD["FedAvg"], PLAN, seed=4)
    assert [one.faults for one in run.rounds] == [(), ()]
    require_same(run.params, simulate(normed, HUNDREDFOLD, METHOD["FedAvg"], PLAN, seed=4, engine="loop").params)


CHECKS = (
    *(partial(hundredfold, cell.subject) for cell in UNEVEN[:3]),
    *(partial(lopsided, cell.subject) for cell in UNEVEN[3:5]), one_mover, seldom_drawn, on_flower,
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "check"), list(zip(UNEVEN, CHECKS, strict=True)), ids=lambda one: getattr(one, "name", "")
)
def test_all_count(cell, check):
    check()
