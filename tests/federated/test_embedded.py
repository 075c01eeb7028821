"""Whole runs: against plain SGD, the same for all methods, faults survived, the choice of an engine, the record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from federated import worlds
from refusals import refused
from sparing.errors import RunError
from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.engines import choose
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.metrics import Accuracy
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.settings import Schedule, rate_at, sample_clients
from sparing.seeds import number, stream

SCHEDULE = Schedule(rounds=3, participation=0.5, local_epochs=1, batch_size=4, lr=0.2)
ALL = replace(SCHEDULE, participation=1.0)
TEST = worlds.client(40, 99)
JUDGE = Accuracy(TEST.inputs, TEST.targets)


def go(make=worlds.perceptron, clients=None, method=worlds.AVERAGE, schedule=SCHEDULE, **options):
    return simulate(make, clients or worlds.make_clients(), method, schedule, **{"seed": 2, "engine": "loop"} | options)


def start(make=worlds.perceptron, seed=2):
    torch.manual_seed(number(seed, "federated", "model"))
    return make()


# With ε = 1e-3 a step of AdamW along a gradient near 0 does not turn on its last bits.
OPTIMIZERS = {
    "sgd": ({"lr": ALL.lr}, partial(torch.optim.SGD, momentum=0.9)),
    "adamw": ({"lr": 0.01, "beta2": 0.95, "eps": 1e-3}, partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-3)),
}


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_client_is_the_plain_optimizer(engine, kind):
    """torch's optimizer, anew each round, over the same orders; no server in between."""
    changes, of = OPTIMIZERS[kind]
    schedule = replace(ALL, local_epochs=2, decay="cosine", weight_decay=0.01, optimizer=kind, **changes)
    client = worlds.client(10)
    model = start()
    for at in range(schedule.rounds):
        optimizer = of(model.parameters(), lr=rate_at(schedule, at), weight_decay=0.01)
        source = stream(2, "federated", "order", at, 0)
        for _ in range(2):
            for rows in torch.randperm(10, generator=source).split_with_sizes([4, 4, 2]):
                optimizer.zero_grad()
                F.cross_entropy(model(client.inputs[rows]), client.targets[rows]).backward()
                optimizer.step()
    run = go(clients=[client], schedule=schedule, engine=engine)
    # 18 float64 steps of three products each; nothing amplifies.
    assert worlds.max_difference({name: p.detach() for name, p in model.named_parameters()}, run.params) <= 1e-13


def test_one_big_step_is_the_weighted_mean_gradient():
    """One full-batch step at each client with weights by size: a step on all rows together, by autograd."""
    schedule = Schedule(rounds=1, participation=1.0, local_epochs=1, batch_size=99, momentum=0.0, lr=0.5,
                        weights="size")  # fmt: skip
    clients, model = worlds.make_clients(), start()
    inputs, targets = (torch.cat([getattr(c, what) for c in clients]) for what in ("inputs", "targets"))
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(params.values()))
    expected = {name: (p - 0.5 * g).detach() for (name, p), g in zip(params.items(), grads, strict=True)}
    assert worlds.max_difference(expected, go(schedule=schedule).params) <= 1e-14


def test_methods_see_the_same_clients_and_the_global_generator_is_left_alone():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    seen = [set(go(method=method).state.clients) for method in (FedAvg(), FedDyn(alpha=0.1))]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert seen[0] == seen[1] == {c for at in range(3) for c in sample_clients(SCHEDULE, 4, at, 2)}
    assert not worlds.equal(go().params, go(seed=3).params)


def test_client_state_begins_with_the_initial_model_and_is_kept_between_visits():
    class Recording(FedAvg):
        def client_state(self, params):
            return {"first": {"n": params["2.bias"].clone()}, "visits": {"n": torch.zeros(())}}

        def finish(self, sent, params, state, steps, lr, buffers=None):
            return {**state, "visits": {"n": state["visits"]["n"] + 1}}, {}

    run = go(method=Recording(), schedule=replace(SCHEDULE, rounds=5))
    results = [sample_clients(SCHEDULE, 4, at, 2) for at in range(5)]
    for client, state in run.state.clients.items():
        assert torch.equal(state["first"]["n"], start()[2].bias.detach())
        assert int(state["visits"]["n"]) == sum(client in ids for ids in results)


def test_record():
    run = go(evaluate=JUDGE, method=FedProx(mu=0.1), every=2, schedule=ALL)
    row, size = run.record[1], 8 * (3 * 5 + 5 + 5 * 3 + 3)
    assert [("accuracy" in row) for row in run.record] == [False, True, True]  # every second one, and the last
    assert (row["round"], row["answered"], row["left_out"], row["lr"]) == (2, 4, "", 0.2)
    assert (row["bytes_up"], row["bytes_down"], row["steps"]) == (4 * size, 4 * size, 2 + 3 + 2 + 3)
    assert row["fusion_gap"] == pytest.approx(row["accuracy"] - row["client_accuracy"])
    assert row["clients_per_second"] == pytest.approx(4 / row["seconds"])
    assert {"ssr_global", "ssr_pairs", "flips_linear", "norm", "rms_bias", "update_cosine"} <= row.keys()
    last = run.record[-1]
    model = start()
    model.load_state_dict(run.params)
    assert last["accuracy"] == JUDGE(model)["accuracy"]
    assert "client_accuracy" not in go(evaluate=JUDGE, members=False).record[-1]


def test_layer_sampling_trains_sends_and_averages_what_was_drawn():
    schedule = replace(ALL, rounds=1, blocks=1, lr=0.02)
    run = go(make=worlds.deep, schedule=schedule)
    sizes = 8 * 4 * 3  # bytes of a layer
    assert run.record[0]["bytes_up"] == 4 * 3 * sizes  # embed, head and one of four body blocks
    assert run.record[0]["bytes_down"] == 4 * 6 * sizes
    single = []
    for client in range(4):
        only = [
            c if at == client else Client(c.inputs[:1], c.targets[:1]) for at, c in enumerate(worlds.make_clients())
        ]
        mute = go(make=worlds.deep, clients=only, schedule=schedule, tamper=_Only(client))
        single.append((mute.params, mute.record[0]["answered"]))
    initial = dict(start(worlds.deep).named_parameters())
    for name, value in run.params.items():
        moved = [params[name] for params, _ in single if not torch.equal(params[name], initial[name])]
        expected = torch.stack(moved).mean(0) if moved else initial[name].detach()
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-16)  # a mean of at most four
    assert all(answered == 1 for _, answered in single)


class _Only:
    """Lets one client through."""

    def __init__(self, client):
        self.client = client

    def __call__(self, update, params):
        if update.client != self.client:
            raise RunError("mute")
        return update


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("crash", "crash (RunError: sabotage)"),
        ("not finite", "not finite (0.weight)"),
        ("wrong shape", "wrong shape (0.weight is (5, 3, 1) float64, the model's (5, 3) float64)"),
        ("huge", "huge ("),
    ],
)
def test_faults_are_named_and_the_round_survives(kind, text):
    class One(Sabotage):
        def is_hostile(self, client):
            return client == 2

    run = go(schedule=ALL, tamper=One(kind=kind, share=0.5), method=FedDyn(alpha=0.1))
    assert all(row["left_out"].startswith(f"client 2: {text}") for row in run.record)
    assert [row["answered"] for row in run.record] == [3, 3, 3]
    assert 2 not in run.state.clients  # the server never received its update
    assert all(bool(value.isfinite().all()) for value in run.params.values())


def test_too_few_left():
    with pytest.raises(RunError, match="round 1: 0 clients left of the 1"):
        go(tamper=Sabotage(kind="crash", share=1.0))
    with pytest.raises(RunError, match="round 1: 2 clients left of the 3"):
        go(guard=Guard(least=3))


def test_batch_norm_kept_by_clients():
    run = go(make=worlds.normed, schedule=replace(ALL, batch_norm="local"))
    local_bn = run.state.local_bn
    assert local_bn.keys() == {0, 1, 2, 3}
    assert not torch.equal(local_bn[0]["1.running_mean"], local_bn[1]["1.running_mean"])
    assert int(local_bn[1]["1.num_batches_tracked"]) == 9  # its own count of three rounds
    torch.testing.assert_close(run.params["1.weight"], torch.stack([o["1.weight"] for o in local_bn.values()]).mean(0))


def test_batch_norm_estimated_anew_or_mixed():
    proxy = worlds.client(64, 50).inputs
    run = go(make=worlds.normed, schedule=replace(ALL, batch_norm="recalibrate"), proxy=proxy)
    hidden = proxy @ run.params["0.weight"].T + run.params["0.bias"]
    torch.testing.assert_close(run.buffers["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(run.buffers["1.running_var"], hidden.var(0))
    plain, mixed = (go(make=worlds.normed, schedule=replace(ALL, rounds=1), mixture=on) for on in (False, True))
    assert (mixed.buffers["1.running_var"] > plain.buffers["1.running_var"]).all()
    assert torch.equal(mixed.buffers["1.running_mean"], plain.buffers["1.running_mean"])
    assert int(plain.buffers["1.num_batches_tracked"]) == 3  # the largest, not a mean


def test_choice_of_an_engine(monkeypatch):
    short = replace(SCHEDULE, rounds=1)
    assert go(schedule=short, engine="auto").engine == "batched"
    assert go(make=worlds.normed, schedule=short, engine="auto").engine == "batched"
    assert go(make=worlds.hooked_normed, schedule=short, engine="auto").engine == "loop"
    assert go(make=worlds.residual, schedule=short, engine="auto").engine == "loop"
    rows = worlds.make_clients(shape=(1, 3))
    assert go(worlds.convolutional, rows, schedule=short, engine="auto").engine == "batched"
    assert go(worlds.convolutional, rows, schedule=short, engine="auto", workers=1).engine == "loop"
    unsendable = lambda: worlds.convolutional()  # noqa: E731  # what pickle cannot send
    assert go(unsendable, rows, schedule=short, engine="auto", workers=2).engine == "loop"
    monkeypatch.setattr(choose, "_MAX_STACKED", 10)
    assert go(schedule=short, engine="auto").engine == "loop"


@pytest.mark.processes
def test_convolutions_go_to_processes():
    clients, schedule = worlds.make_clients(shape=(1, 3)), replace(SCHEDULE, rounds=1)
    run = go(worlds.convolutional, clients, schedule=schedule, engine="auto", workers=2)
    assert run.engine == "workers"


def test_weights_are_measured_where_it_is_due():
    found = [("norm" in row, "zero" in row) for row in go(evaluate=lambda model: {"zero": 0.0}, every=2).record]
    assert found == [(False, False), (True, True), (True, True)]
    assert [("norm" in row) for row in go(every=5).record] == [False, False, True]


def test_progress(capsys):
    go(label="clients", evaluate=JUDGE)
    said = capsys.readouterr().err
    assert "clients: 3 rounds to do" in said
    assert "rounds/s" in said
    assert "accuracy" in said
    go()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients": [Client(torch.ones(2, 3), torch.ones(3))]}, "client 0: got 2 inputs and 3 targets"),
        ({"clients": [Client(torch.ones(0, 3), torch.ones(0))]}, "a client needs rows"),
        ({"every": 0}, "it is a number of rounds"),
        ({"checkpoint_every": 0}, "it is a number of rounds"),
        ({"resume": True}, "no file to go on from"),
        ({"engine": "ray"}, "no such engine"),
        ({"make": worlds.normed, "schedule": replace(ALL, batch_norm="recalibrate")}, "rows of its own"),
    ],
)
def test_bad_input(options, why):
    refused(why, go, **options)
    refused("somebody must train", simulate, worlds.perceptron, [], FedAvg(), SCHEDULE)
