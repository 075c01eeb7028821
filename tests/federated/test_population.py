"""Clients that are made when drawn: the same run, and nobody is made who is not drawn."""

from __future__ import annotations

import pytest
import torch

from federated import worlds
from refusals import refused
from sparing.errors import UserError
from sparing.federated.client.population import Population
from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.settings import Schedule, sample_clients

SCHEDULE = Schedule(rounds=3, participation=0.3, local_epochs=1, batch_size=4, lr=0.1, momentum=0.0)
SIZES = tuple(3 + client % 5 for client in range(20))


def made_by(asked=None):
    def make(client):
        if asked is not None:
            asked.append(client)
        return worlds.client(SIZES[client], client)

    return Population(make, torch.tensor(SIZES))


def go(clients, engine="auto", **options):
    return simulate(worlds.perceptron, clients, SCAFFOLD(), SCHEDULE, seed=4, engine=engine, **options)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_the_same_bits_as_of_clients_at_hand(engine):
    asked = []
    lazy, eager = go(made_by(asked), engine), go([worlds.client(rows, at) for at, rows in enumerate(SIZES)], engine)
    assert worlds.equal(lazy.params, eager.params)
    assert lazy.engine == engine
    drawn = [client for number in range(3) for client in sample_clients(SCHEDULE, 20, number, 4)]
    assert set(asked) <= {0, *drawn}  # the first is looked at before the run
    assert [client for client in asked if client] == [client for client in drawn if client]  # each once a round


def test_who_is_unlike_the_first_is_trained_by_the_loop():
    def make(client):
        rows = worlds.client(4, client)
        return Client(rows.inputs.float(), rows.targets) if client % 2 else rows

    run = go(Population(make, torch.full((20,), 4)), "batched")
    assert "client" in run.record[0]["left_out"]
    assert "crash" in run.record[0]["left_out"]


def test_sizes_are_checked():
    refused("counts the rows of each client", Population, worlds.client, torch.ones(2, 2))
    refused("a client needs rows", Population, worlds.client, torch.tensor([1, 0]))
    everyone = Population(lambda client: worlds.client(3), torch.tensor([3, 4]))
    assert len(everyone[0]) == 3
    with pytest.raises(UserError, match="client 1: got 3 rows; its size is 4"):
        everyone[1]
    with pytest.raises(IndexError):
        everyone[2]
    with pytest.raises(UserError, match="made when drawn lie in no file"):
        go(made_by(), "workers")
