"""Clients that train drawn blocks: they send nothing else, and a weight is the mean of those that trained it."""

from __future__ import annotations

import torch

from federated import worlds
from sparing.federated import FedAvg, Schedule, simulate
from sparing.federated.client.train import client_setup, frozen_names
from sparing.federated.metrics import Accuracy
from sparing.federated.settings import sample_clients
from sparing.seeds import stream

CLIENTS = [worlds.client(rows=8, at=at) for at in range(6)]
SEED = 2
BLOCK = 8 * (3 * 3 + 3)  # bytes of Linear(3, 3) in float64


def run(**more):
    schedule = Schedule(rounds=1, participation=0.5, local_epochs=1, batch_size=4, lr=0.1, **more)
    test = worlds.client(rows=4, at=9)
    return schedule, simulate(
        worlds.deep, CLIENTS, FedAvg(), schedule, seed=SEED, engine="loop", evaluate=Accuracy(test.inputs, test.targets)
    )


def test_bytes_fall_with_the_blocks():
    """Of six layers four are the body; with one of them a client sends three layers."""
    _, whole = run()
    _, one = run(blocks=1)
    assert whole.record[0]["bytes_up"] == 3 * 6 * BLOCK
    assert one.record[0]["bytes_up"] == 3 * 3 * BLOCK
    assert one.record[0]["bytes_down"] == whole.record[0]["bytes_down"]  # to run a model, a client needs all of it


def start_of_all() -> dict[str, torch.Tensor]:
    """The initial model of this seed: a rate so small that a step is lost in rounding."""
    schedule = Schedule(rounds=1, participation=0.5, local_epochs=1, batch_size=4, lr=1e-300)
    return dict(simulate(worlds.deep, CLIENTS, FedAvg(), schedule, seed=SEED, engine="loop").params)


def single(client: int, rest: frozenset[str], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain SGD with momentum over the client's rows in its order, with torch's own optimizer."""
    model = worlds.deep()
    model.load_state_dict(start)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in rest)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    rows = CLIENTS[client]
    order = torch.randperm(8, generator=stream(SEED, "federated", "order", 0, client))
    for batch in (order[:4], order[4:]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows.inputs[batch]), rows.targets[batch]).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_block_that_nobody_drew_stays_and_another_is_the_mean_of_its_own_clients():
    """Each client is run alone by FedAvg of one; the mean by hand is over those that had the block."""
    schedule, found = run(blocks=1)
    setup = client_setup(worlds.deep(), FedAvg(), schedule, seed=SEED)
    ids = sample_clients(schedule, len(CLIENTS), 0, SEED)
    frozen = {client: frozen_names(setup, 0, client) for client in ids}
    start = start_of_all()
    alone = {client: single(client, frozen[client], start) for client in ids}
    moved = 0
    for name, value in found.params.items():
        voters = [alone[client][name] for client in ids if name not in frozen[client]]
        expected = torch.stack(voters).mean(0) if voters else start[name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        moved += not torch.equal(value, start[name])
    assert 4 <= moved < 12  # embed and head at least, one block at least at rest
