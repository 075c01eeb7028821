"""Stacked clients equal the plain loop in float64, ragged or not, for every method that can be stacked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from federated import worlds
from sparing.errors import UserError
from sparing.federated.client.train import Client, client_setup
from sparing.federated.embedded import simulate
from sparing.federated.engines.batched import Batched, stacked_forward
from sparing.federated.engines.interface import Loop
from sparing.federated.engines.stacked import StackedNet
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, OwnSign
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Sent
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.settings import Schedule

CLIENTS = worlds.make_clients((7, 12, 1, 9, 3))
RAGGED = Schedule(rounds=3, participation=0.8, local_epochs=2, batch_size=4, lr=0.2, weight_decay=0.01)
FLAT = Schedule(rounds=3, participation=1.0, local_epochs=2, batch_size=4, lr=0.2, momentum=0.0, clip=0.3)

# Float64: sums of at most 5 products in another order, 18 steps that do not amplify: some 1e-16 each.
BOUND = 1e-13

METHODS = [FedAvg(), FedProx(mu=0.5), FedDyn(alpha=0.1), FedSign(gamma=0.5), OwnSign(gamma=0.5), Hinge(gamma=0.5)]
METHODS += [FedDyn(alpha=0.1, weights="size"), Ditto(lam=0.5)]


@pytest.fixture(autouse=True)
def no_loop_instead(monkeypatch, request):
    """A stacked round that raises would be done by the loop, and equal it."""

    class Refuses:
        def __init__(self, setup, clients):
            self.train_clients = None

    if "raises" not in request.node.name:
        monkeypatch.setattr("sparing.federated.engines.batched.Loop", Refuses)


def both(make, method, schedule, clients=CLIENTS, **options):
    return [simulate(make, clients, method, schedule, seed=3, engine=kind, **options) for kind in ("loop", "batched")]


# With ε = 1e-3 a step of AdamW along a gradient near 0 does not turn on its last bits.
ADAMW = replace(RAGGED, optimizer="adamw", lr=0.01, eps=1e-3, weight_decay=0.0)
PAIRS = [(method, schedule) for method in METHODS for schedule in (RAGGED, FLAT)]
PAIRS += [(method, ADAMW) for method in METHODS[:3]]  # the others refuse it


@pytest.mark.parametrize(("method", "schedule"), PAIRS, ids=lambda one: getattr(one, "name", None))
def test_equals_the_loop(method, schedule):
    loop, batched = both(worlds.perceptron, method, schedule)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND
    for mine, theirs in zip(loop.record, batched.record, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=BOUND)
        assert (mine["steps"], mine["answered"], mine["bytes_up"]) == (
            theirs["steps"],
            theirs["answered"],
            theirs["bytes_up"],
        )
    for client, state in loop.state.clients.items():
        for key, vector in state.items():
            assert worlds.max_difference(vector, batched.state.clients[client][key]) <= 10 * BOUND  # divided by a step


def test_fednova_equals_the_loop():
    loop, batched = both(worlds.perceptron, FedNova(momentum=0.9), RAGGED)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


def test_scaffold_equals_the_loop():
    loop, batched = both(worlds.perceptron, SCAFFOLD(), replace(FLAT, clip=None))
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


@pytest.mark.parametrize("make", [worlds.residual, worlds.hooked])
def test_other_models_equal_the_loop_under_vmap(make):
    clients = worlds.make_clients((7, 12, 1))
    loop, batched = both(make, FedProx(mu=0.1), RAGGED, clients)
    assert not isinstance(stacked_forward(make(), clients[0].inputs), StackedNet)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


def test_hooks_are_called():
    """FedPAN's change lies in forward hooks, which layers side by side would not call."""
    method = FedPAN(amplitude=0.5)
    loop, batched = both(worlds.perceptron, method, RAGGED)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND
    plain = simulate(worlds.perceptron, CLIENTS, FedAvg(), RAGGED, seed=3, engine="batched")
    assert worlds.max_difference(loop.params, plain.params) > 1e-3


def test_perceptron_forward_is_the_models_own():
    layers = (nn.Flatten(), nn.Linear(4, 3, bias=False), nn.GELU(), nn.Linear(3, 2), nn.Identity())
    model = nn.Sequential(*layers).double()
    inputs = torch.randn(2, 5, 2, 2, dtype=torch.float64)
    stacked = {name: torch.stack([p, 2 * p]).detach() for name, p in model.named_parameters()}
    found = StackedNet(model)(stacked, inputs)
    for at in (0, 1):
        own = {name: value[at] for name, value in stacked.items()}
        expected = torch.func.functional_call(model, own, (inputs[at],))
        torch.testing.assert_close(found[at], expected, rtol=1e-14, atol=1e-15)


def test_a_client_that_diverges_harms_no_other():
    wild = Client(CLIENTS[0].inputs * 1e308 * 10, CLIENTS[0].targets)
    run = simulate(worlds.perceptron, [*CLIENTS, wild], FedAvg(), FLAT, seed=3, engine="batched")
    loop = simulate(worlds.perceptron, [*CLIENTS, wild], FedAvg(), FLAT, seed=3, engine="loop")
    assert "client 5: not finite" in run.record[0]["left_out"]
    assert run.record[0]["left_out"] == loop.record[0]["left_out"]
    assert all(bool(value.isfinite().all()) for value in run.params.values())
    assert worlds.max_difference(loop.params, run.params) <= BOUND


def test_a_client_that_raises_is_found_by_the_loop():
    odd = Client(CLIENTS[0].inputs, CLIENTS[0].targets + 9)  # no such class
    run = simulate(worlds.perceptron, [*CLIENTS, odd], FedAvg(), FLAT, seed=3, engine="batched")
    assert run.record[0]["left_out"].startswith("client 5: crash (IndexError: Target")
    assert run.record[0]["answered"] == 5


def test_a_client_without_rows():
    setup = client_setup(worlds.perceptron(), FedAvg(), FLAT)
    empty = Client(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
    params = {name: value.detach().clone() for name, value in setup.params.items()}
    engine = Batched(setup, [CLIENTS[0], empty])
    results, faults = engine.train_clients(0, (0, 1), Sent(params), {0: {}, 1: {}}, {})
    assert ([one.update.client for one in results], list(map(str, faults))) == ([0], ["client 1: crash (no rows)"])
    assert engine.train_clients(0, (1,), Sent(params), {1: {}}, {})[0] == []


@pytest.mark.parametrize(
    ("make", "changes", "why"),
    [
        (worlds.hooked_normed, {}, "batch norm, and 0 has a hook"),
        (worlds.normed, {"schedule": Schedule(rounds=1, batch_norm="local")}, "batch norm of its own"),
        (worlds.dropping, {}, "Dropout would draw other numbers"),
        (worlds.perceptron, {"method": MOON()}, "'moon' needs the model or its features"),
        (worlds.deep, {"schedule": Schedule(rounds=1, blocks=1)}, "clients draw blocks"),
        (worlds.perceptron, {"loss": worlds.failing_loss}, "only the cross-entropy"),
        (worlds.perceptron, {"clients": [Client(torch.ones(2, 3), torch.ones(2, 3))]}, "not class numbers"),
        (worlds.perceptron, {"clients": [CLIENTS[0], Client(torch.ones(2, 3), torch.ones(2).long())]}, "differ in"),
    ],
)
def test_refused_with_a_reason(make, changes, why):
    given = {"clients": CLIENTS, "method": FedAvg(), "schedule": FLAT} | changes
    with pytest.raises(UserError, match=why):
        simulate(make, given.pop("clients"), given.pop("method"), given.pop("schedule"), engine="batched", **given)


@pytest.mark.parametrize("make", [worlds.normed, worlds.perceptron])
def test_stacked_clients_are_not_handed_to_the_loop(make, monkeypatch):
    """Which a stacked round does with any error, and gives the same numbers, more slowly."""

    def fail(self, *given):
        raise AssertionError("the loop was called")

    monkeypatch.setattr(Loop, "train_clients", fail)
    run = simulate(make, worlds.make_clients(), FedAvg(), replace(FLAT, rounds=2), engine="batched")
    assert [row["left_out"] for row in run.record] == ["", ""]
