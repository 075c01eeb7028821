"""A client whose settings differ from its server's is named with the fields, and counts in no mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from federated.worlds import equal, make_clients, normed, perceptron
from refusals import refused
from sparing.errors import RunError
from sparing.federated import FedAvg, FedDyn, FedPAN, FedProx, FedSign, Private, Schedule, simulate
from sparing.federated.server.robust import Median

pytest.importorskip("flwr", reason="needs the extra [flower]")

from sparing.federated import flower
from sparing.federated.flower.agreement import client_settings, require_agreement

SCHEDULE = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.3, momentum=0.5)
CLIENTS = make_clients()
METHOD = FedProx(mu=0.1)


def federation(client, server, make=perceptron):
    """Clients of one method and schedule, and a server of another."""
    (method, schedule), (servers, its) = client, server
    app = flower.client_app(method, make, CLIENTS.__getitem__, schedule)
    return flower.InProcessGrid(app, 4), flower.strategy(servers, its, make, 4, patience=0.0)


DIFFERENT = {
    "lr": ({"lr": 0.03}, "Schedule.lr 0.03 (server: 0.3)"),
    "momentum": ({"momentum": 0.9}, "Schedule.momentum 0.9 (server: 0.5)"),
    "optimizer": ({"optimizer": "adamw"}, "Schedule.optimizer adamw (server: sgd)"),
    "batch size": ({"batch_size": 8}, "Schedule.batch_size 8 (server: 4)"),
    "local epochs": ({"local_epochs": 2}, "Schedule.local_epochs 2 (server: 1)"),
    "weight decay": ({"weight_decay": 1e-4}, "Schedule.weight_decay 0.0001 (server: 0)"),
    "clip": ({"clip": 1.0}, "Schedule.clip 1 (server: None)"),
    "warm-up": ({"warmup_rounds": 1}, "Schedule.warmup_rounds 1 (server: 0)"),
    "decay": ({"decay": "cosine"}, "Schedule.decay cosine (server: none), Schedule.rounds 2 (server: unset)"),
    "least steps": ({"least_steps": 7}, "Schedule.least_steps 7 (server: 0)"),
    "batch norm": ({"batch_norm": "local"}, "Schedule.batch_norm local (server: average)"),
    "two": ({"lr": 1, "clip": 2}, "Schedule.clip 2 (server: None), Schedule.lr 1 (server: 0.3)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_another_schedule_is_refused_with_its_fields(case):
    change, named = DIFFERENT[case]
    grid, server = federation((METHOD, replace(SCHEDULE, **change)), (METHOD, SCHEDULE))
    says = "pass client_app and strategy the same method and Schedule"
    with pytest.raises(RunError, match="0 clients left") as told:
        server.start(grid, server.initial_arrays(), 1)
    assert named in str(told.value)
    assert says in str(told.value)


METHODS = {
    "strength": (FedProx(mu=0.2), "FedProx.mu 0.2 (server: 0.1)"),
    "kind": (FedAvg(), "FedProx.mu unset (server: 0.1), method FedAvg (server: FedProx)"),
}


@pytest.mark.parametrize("case", METHODS)
def test_another_method_is_refused_with_its_fields(case):
    method, named = METHODS[case]
    grid, server = federation((method, SCHEDULE), (METHOD, SCHEDULE))
    with pytest.raises(RunError, match="0 clients left") as told:
        server.start(grid, server.initial_arrays(), 1)
    assert named in str(told.value)


def test_one_client_of_four_is_left_out_and_the_others_go_on():
    """The model is that of a run in which this client crashes."""
    apps = [
        flower.client_app(METHOD, normed, CLIENTS.__getitem__, replace(SCHEDULE, lr=lr), held_of=CLIENTS.__getitem__)
        for lr in (0.3, 0.03)
    ]

    def app(message, context):
        return apps[context.node_config["partition-id"] == 2](message, context)

    server = flower.strategy(METHOD, SCHEDULE, normed, 4, patience=0.0, evaluation=1.0)
    server.start(flower.InProcessGrid(app, 4), server.initial_arrays(), 2)

    def crash(update, params):
        if update.client == 2:
            raise RuntimeError
        return update

    same = simulate(normed, CLIENTS, METHOD, SCHEDULE, engine="loop", tamper=crash)
    assert equal(server.params, same.params)
    assert equal(server.buffers, same.buffers)
    for one in server.rounds:
        assert (one.received, one.evaluated) == ((0, 1, 3), (0, 1, 3))
        assert [fault.client for fault in one.faults] == [2, 2]
        assert all("Schedule.lr 0.03 (server: 0.3)" in fault.detail for fault in one.faults)


def test_what_only_the_server_reads_may_differ():
    """Who is drawn, how much each counts, how long a run is, and what the server makes of the updates."""
    here = replace(SCHEDULE, rounds=9, participation=0.1, weights="size")
    grid, server = federation((FedProx(mu=0.1), here), (FedProx(mu=0.1, combine=Median()), SCHEDULE))
    server.start(grid, server.initial_arrays(), 2)
    same = simulate(perceptron, CLIENTS, FedProx(mu=0.1, combine=Median()), SCHEDULE, engine="loop")
    assert equal(server.params, same.params)


def test_equal_values_are_equal_however_they_are_written():
    one = client_settings(FedSign(gamma=1, only=("0.weight",)), replace(SCHEDULE, lr=1, clip=2))
    other = client_settings(FedSign(gamma=1.0, only=["0.weight"]), replace(SCHEDULE, lr=1.0, clip=2.0))
    assert one == other
    for near in (0.1 + 0.2, torch.tensor(0.3).item()):
        assert client_settings(FedAvg(), replace(SCHEDULE, lr=near)) != client_settings(FedAvg(), SCHEDULE)


def test_the_seed_of_a_noise_is_not_sent_and_its_strength_is():
    made = [client_settings(Private(FedDyn(), noise=z, clip=1, per_round=4, seed=s), SCHEDULE)
            for z, s in ((1, 5), (1, 6), (2, 5))]  # fmt: skip
    assert made[0] == made[1] != made[2]
    assert not any("seed" in name for name in made[0])
    assert (made[0]["method"], made[0]["Private.method"], made[0]["FedDyn.alpha"]) == ("Private", "FedDyn", "0.01")


def test_a_server_that_sends_no_settings_is_refused():
    refused("server's settings: got none with the message", require_agreement, client_settings(FedPAN(), SCHEDULE), {})
