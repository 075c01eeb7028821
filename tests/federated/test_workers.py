"""Processes give the loop's bits, however many they are; a client that kills its process is named."""

from __future__ import annotations

import pytest
import torch

from federated import worlds
from sparing.errors import UserError
from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.engines.workers import cores
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.settings import Schedule

pytestmark = pytest.mark.processes

SCHEDULE = Schedule(rounds=2, participation=0.7, local_epochs=1, batch_size=4, lr=0.2, momentum=0.0)
LOCAL = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, batch_norm="local")


def go(method, schedule, make, clients=None, **options):
    return simulate(make, clients or worlds.make_clients(), method, schedule, seed=2, **options)


@pytest.mark.parametrize(
    ("method", "schedule", "make", "workers"),
    [
        (SCAFFOLD(), SCHEDULE, worlds.residual, 1),
        (FedAvg(), LOCAL, worlds.normed, 2),
        (MOON(mu=1.0), SCHEDULE, worlds.dropping, 3),
        (FedNova(), SCHEDULE, worlds.residual, 2),
        (FedDyn(weights="size"), SCHEDULE, worlds.perceptron, 2),
        (Ditto(), SCHEDULE, worlds.normed, 2),
    ],
    ids=["scaffold", "local", "moon", "fednova", "feddyn by rows", "ditto"],
)
def test_equal_the_loop_to_the_bit(method, schedule, make, workers):
    loop = go(method, schedule, make, engine="loop")
    run = go(method, schedule, make, engine="workers", workers=workers)
    assert run.engine == "workers"
    assert worlds.equal(loop.params, run.params)
    assert worlds.equal(loop.buffers, run.buffers)
    assert [row["train_loss"] for row in loop.record] == [row["train_loss"] for row in run.record]
    for client, state in loop.state.clients.items():
        assert state.keys() == run.state.clients[client].keys()
        assert all(worlds.equal(vector, run.state.clients[client][key]) for key, vector in state.items())


def only(which):
    return Client(torch.ones(5, 3, dtype=torch.float64), torch.full((5,), which))


def test_clients_that_raise_or_kill_their_process_are_named():
    clients = [worlds.client(9), only(2), worlds.client(8, 1), only(0)]
    schedule = Schedule(rounds=1, participation=1.0, local_epochs=1)
    options = {"engine": "workers", "workers": 2, "clients": clients}
    raised = go(FedAvg(), schedule, worlds.perceptron, loss=worlds.failing_loss, **options)
    assert raised.record[0]["left_out"] == "client 1: crash (ArithmeticError: no such class)"
    killed = go(FedAvg(), schedule, worlds.perceptron, loss=worlds.killing_loss, **options)
    assert killed.record[0]["left_out"] == "client 1: crash (its process died: out of memory, or killed)"
    assert killed.record[0]["answered"] == 3
    assert worlds.equal(raised.params, killed.params)


def test_bad_input():
    assert cores() >= 1
    with pytest.raises(UserError, match="someone must do the work"):
        go(FedAvg(), SCHEDULE, worlds.perceptron, engine="workers", workers=0)
    with pytest.raises(UserError, match="sent to other processes by pickle"):
        go(FedAvg(), SCHEDULE, lambda: worlds.perceptron(), engine="workers", workers=2)
