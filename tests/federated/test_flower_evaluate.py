"""The global model measured by Flower's clients, each on held-out rows of its own, against a plain loop over them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.federated import flower
from sparing.federated.client.train import Client, load_
from sparing.federated.embedded import simulate
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.metrics import Accuracy
from sparing.federated.settings import Schedule
from sparing.seeds import stream

pytest.importorskip("flwr", reason="needs the extra [flower]")

CLIENTS = 4


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def rows(client, purpose, count):
    draw = stream(1, purpose, client)
    return Client(torch.randn(count, 4, generator=draw) + client, torch.randint(3, (count,), generator=draw))


ROWS = [rows(client, "rows", 16) for client in range(CLIENTS)]
HELD = [rows(client, "held", 5 + 3 * client) for client in range(CLIENTS)]


def schedule(**changes):
    settings = {"rounds": 3, "participation": 0.5, "local_epochs": 1, "batch_size": 8, "momentum": 0.0}
    return Schedule(**(settings | changes))


def by_hand(run, held, local_bn=None):
    """Mean accuracy over all held-out rows, client by client in a plain loop."""
    model, hits = make_model(), 0.0
    for client, rows in enumerate(held):
        mine = (local_bn or {}).get(client, {})
        load_(model, {**run.params, **{n: v for n, v in mine.items() if n in run.params}}, run.buffers)
        load_(model, {}, {n: v for n, v in mine.items() if n in run.buffers})
        model.eval()
        hits += int((model(rows.inputs).argmax(-1) == rows.targets).sum())
    return hits / sum(len(rows) for rows in held)


@pytest.mark.parametrize("method", [FedAvg(), FedDyn(alpha=0.1)])
def test_the_mean_is_over_all_held_out_rows(method):
    found = flower.run_in_process(make_model, ROWS, method, schedule(), held=HELD, seed=5)
    # Flower averages accuracies by rows in float64: a few units in the last place.
    assert found.metrics[3]["held-accuracy"] == pytest.approx(by_hand(found, HELD), rel=1e-12)
    assert [one.evaluated for one in found.rounds] == [(0, 1, 2, 3)] * 3


def test_a_client_that_keeps_batch_norm_measures_with_its_own():
    local = schedule(batch_norm="local", rounds=4)
    found = flower.run_in_process(make_model, ROWS, FedAvg(), local, held=HELD, seed=5)
    same = simulate(make_model, ROWS, FedAvg(), local, seed=5, engine="loop")
    mine, theirs = by_hand(found, HELD, same.state.local_bn), by_hand(found, HELD)
    assert mine != theirs, "the two must differ for the test to tell"
    assert found.metrics[4]["held-accuracy"] == pytest.approx(mine, rel=1e-12)


@pytest.mark.parametrize("method", [FedAvg(), FedDyn(alpha=0.1)])
def test_measuring_changes_nothing_of_the_training(method):
    for changes in ({}, {"batch_norm": "local"}):
        with_, without = (
            flower.run_in_process(make_model, ROWS, method, schedule(**changes), held=held, seed=5)
            for held in (HELD, None)
        )
        assert all(torch.equal(with_.params[name], value) for name, value in without.params.items())
        assert all(torch.equal(with_.buffers[name], value) for name, value in without.buffers.items())


def hosted(held_of, evaluation=1.0, mods=(), judge=lambda rows: Accuracy(rows.inputs, rows.targets)):
    method, settings = FedAvg(), schedule(rounds=1)
    app = flower.client_app(method, make_model, ROWS.__getitem__, settings, held_of=held_of, judge=judge, mods=mods)
    server = flower.strategy(method, settings, make_model, CLIENTS, patience=0.0, evaluation=evaluation)
    return flower.InProcessGrid(app, CLIENTS), server


def test_a_share_is_drawn_apart_from_the_training():
    grid, server = hosted(HELD.__getitem__, evaluation=0.5)
    result = server.start(grid, server.initial_arrays(), 1)
    assert len(server.rounds[0].evaluated) == 2
    assert 1 in result.evaluate_metrics_clientapp
    trained = {schedule().participants(CLIENTS)} | {len(server.rounds[0].drawn)}
    assert trained == {2}


def test_a_client_without_held_out_rows_is_named_and_left_out():
    empty = Client(torch.empty(0, 4), torch.empty(0, dtype=torch.long))
    grid, server = hosted(lambda client: empty if client == 1 else HELD[client])
    result = server.start(grid, server.initial_arrays(), 1)
    assert server.rounds[0].evaluated == (0, 2, 3)
    assert "client 1, round 1: it has no held-out rows" in str(server.rounds[0].faults[0])
    kept = [HELD[client] for client in (0, 2, 3)]
    run = type("Run", (), {"params": server.params, "buffers": server.buffers})
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(by_hand(run, kept), rel=1e-12)


def test_a_number_that_is_not_finite_is_named_and_left_out():
    judge = lambda rows: lambda model: {"score": math.nan if len(rows) == 5 else 1.0}  # noqa: E731
    grid, server = hosted(HELD.__getitem__, judge=judge)
    result = server.start(grid, server.initial_arrays(), 1)
    assert str(server.rounds[0].faults[0]) == "client 0: not finite (evaluation: score is not finite)"
    assert result.evaluate_metrics_clientapp[1]["score"] == 1.0


def test_nobody_measures_unless_asked():
    grid, server = hosted(HELD.__getitem__, evaluation=0.0)
    result = server.start(grid, server.initial_arrays(), 1)
    assert server.rounds[0].evaluated == ()
    assert result.evaluate_metrics_clientapp == {}


def test_bad_shares_and_rows_are_refused():
    refused(r"evaluation: got 1\.5", hosted, HELD.__getitem__, evaluation=1.5)
    refused("held: got rows of 1", flower.run_in_process, make_model, ROWS, FedAvg(), schedule(), held=HELD[:1])
