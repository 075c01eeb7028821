"""A server whose process dies twenty times, between rounds and before checkpoints, ends in the same bits."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from federated.worlds import client, equal, make_clients, perceptron
from sparing.federated import FedAvg, FedDyn, Private, Schedule, checkpoint, simulate
from sparing.federated.methods.secure import SecureSum
from sparing.federated.server.trust import FLTrust

CLIENTS, ROUNDS, DEATHS = make_clients(), 24, 20
SCHEDULE = Schedule(rounds=ROUNDS, participation=0.5, local_epochs=1, batch_size=4, lr=0.3, momentum=0.0)
PRIVATE = Private(FedDyn(alpha=0.1), noise=0.05, clip=0.3, per_round=2, quantile=0.5, seed=5)


def delay(client: int, number: int) -> float:
    """Client 3 is late in every second round."""
    return 99.0 if client == 3 and number % 2 else float(client)


RUNS = {
    "private": (PRIVATE, SCHEDULE, {}),
    "secure, late": (SecureSum(FedDyn(alpha=0.1)), replace(SCHEDULE, spare=0.5), {"delays": delay, "patience": 9.0}),
    "trusting": (FedAvg(combine=FLTrust()), SCHEDULE, {"root": client(8, 77)}),
}


def in_a_process_that_dies(work, at: int) -> int:
    """Run ``work`` in a forked process that ends without a word at its ``at``-th step; return its exit status."""
    child = os.fork()
    if child == 0:
        left = [at]

        def step(*_):
            left[0] -= 1
            if not left[0]:
                os._exit(9)
            return {"accuracy": 0.0}

        try:
            work(step)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kind", RUNS)
def test_twenty_deaths_of_a_simulation(kind, tmp_path, monkeypatch):
    """By turns in an evaluation and just before a checkpoint; states, noise and its norm, and who is absent go on."""
    method, schedule, more = RUNS[kind]
    file = tmp_path / "run.safetensors"
    write = checkpoint.write_whole
    deaths = 0
    while deaths < DEATHS:
        writing = deaths % 2

        def work(step, writing=writing):
            def dying(path, data):
                step()
                return write(path, data)

            if writing:
                monkeypatch.setattr(checkpoint, "write_whole", dying)
            simulate(
                perceptron, CLIENTS, method, schedule, engine="loop", checkpoint=file, checkpoint_every=1, resume=True,
                evaluate=None if writing else step, members=False, **more,
            )  # fmt: skip

        # A life of two steps saves a round, one of one step saves none: the run still has rounds left at the end.
        assert in_a_process_that_dies(work, 1 + deaths // 2 % 2) == 9
        deaths += 1
    run = simulate(perceptron, CLIENTS, method, schedule, engine="loop", checkpoint=file, resume=True, **more)
    whole = simulate(perceptron, CLIENTS, method, schedule, engine="loop", **more)
    assert len(run.record) == ROUNDS
    assert [row.get("absent") for row in run.record] == [row.get("absent") for row in whole.record]
    assert equal(run.params, whole.params)
    for key, vector in whole.state.server.items():
        assert equal(vector, run.state.server[key])


class Death(BaseException):
    """What ends a ServerApp, and no handler of errors stops."""


@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_twenty_deaths_of_a_server_on_flower(kind, tmp_path, monkeypatch):
    """By turns before a checkpoint is written and after it; the nodes live on, with their state and with answers that
    no server counted. Three of four clients are asked and the first two count."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    from sparing.federated.flower.client import client_app

    method = FedDyn(alpha=0.1) if kind == "plain" else SecureSum(FedDyn(alpha=0.1), threshold=0.3)
    schedule = replace(SCHEDULE, spare=0.5)
    grid = flower.InProcessGrid(client_app(method, perceptron, CLIENTS.__getitem__, schedule), 4)
    more = {"patience": 0.0, "checkpoint": tmp_path / "server.safetensors", "resume": True}
    write, deaths = checkpoint.write_whole, 0
    while deaths < DEATHS:

        def dying(path, data, after=deaths % 2):
            if after:
                write(path, data)
            raise Death

        monkeypatch.setattr(checkpoint, "write_whole", dying)
        server = flower.strategy(method, schedule, perceptron, 4, **more)
        with pytest.raises(Death):
            server.start(grid, server.initial_arrays(), server.left)
        deaths += 1
    monkeypatch.setattr(checkpoint, "write_whole", write)
    server = flower.strategy(method, schedule, perceptron, 4, **more)
    assert server.left == ROUNDS - DEATHS // 2
    server.start(grid, server.initial_arrays(), server.left)
    whole = simulate(perceptron, CLIENTS, method, schedule, engine="loop")
    assert len(server.rounds) == ROUNDS
    assert equal(server.params, whole.params)
