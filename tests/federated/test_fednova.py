"""FedNova: whole rounds against the paper's formulas in numpy, from single gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from federated import worlds
from refusals import refused
from sparing.federated.client.train import initial_model, row_order
from sparing.federated.embedded import simulate
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Update
from sparing.federated.methods.private import Private
from sparing.federated.methods.secure import SecureSum
from sparing.federated.server.robust import Median
from sparing.federated.settings import Schedule, rate_at, sample_clients

CLIENTS = worlds.make_clients((5, 16, 9, 40))  # of 4, 8, 6 and 20 steps
SCHEDULE = Schedule(rounds=4, participation=0.75, local_epochs=2, batch_size=4, lr=0.2, warmup_rounds=2)


def vector(*values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values, dtype=torch.float64)}


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(("momentum", "weights"), [(0.0, "size"), (0.9, "size"), (0.9, "uniform")])
def test_is_the_papers_rule(momentum: float, weights: str, engine: str):
    """d_k = G_k a_k/‖a_k‖₁ of the stacked gradients G_k, x ← x − τ_eff Σ p_k η d_k, τ_eff = Σ p_k ‖a_k‖₁; the vector
    a_k of momentum ρ is [1 − ρ^τ, …, 1 − ρ]/(1 − ρ)."""
    schedule = replace(SCHEDULE, momentum=momentum, weights=weights)
    run = simulate(worlds.linear, CLIENTS, FedNova(momentum=momentum), schedule, seed=3, engine=engine)
    x = initial_model(FedNova(), worlds.linear, 3).weight.detach().numpy()
    for number in range(schedule.rounds):
        drawn, eta = sample_clients(schedule, 4, number, 3), rate_at(schedule, number)
        sizes = np.array([len(CLIENTS[k]) if weights == "size" else 1.0 for k in drawn])
        directions, lengths = [], []
        for k in drawn:
            found, end = worlds.linear_steps(x, CLIENTS[k], schedule, row_order(3, number, k), number=number)
            tau = len(found)
            a = np.array([sum(momentum**i for i in range(tau - at)) for at in range(tau)])
            along = np.tensordot(a, np.array(found), axes=1)
            np.testing.assert_allclose(end, x - eta * along, atol=1e-13)
            directions.append(along / a.sum())
            lengths.append(a.sum())
        assert len(set(lengths)) == len(drawn)
        p = sizes / sizes.sum()
        x = x - (p @ np.array(lengths)) * eta * np.tensordot(p, np.array(directions), axes=1)
    np.testing.assert_allclose(run.params["weight"].numpy(), x, rtol=0, atol=1e-13)
    plain = simulate(worlds.linear, CLIENTS, FedAvg(), schedule, seed=3, engine=engine)
    assert worlds.max_difference(run.params, plain.params) > 1e-3


def test_by_hand():
    """Steps 1 and 3, moves 1 and 6: τ = 2, mean of 1·2/1 and 6·2/3 is 3. With weights 1 and 3: τ = 10/4, mean 4.375."""
    updates = [Update(0, vector(11), steps=1), Update(1, vector(16), steps=3)]
    assert FedNova().aggregate(vector(10), updates, {}, 2)[0]["x"].item() == 13
    heavy = [updates[0], replace(updates[1], weight=3.0)]
    assert FedNova().aggregate(vector(10), heavy, {}, 2)[0]["x"].item() == pytest.approx(10 + 2.5 * (1 + 3 * 2) / 4)


def test_a_tensor_that_few_clients_send_goes_by_their_steps():
    """Of one sender, and of senders with equal steps, the mean as it is; of steps 1 and 3 as by hand above."""
    base = {name: torch.zeros(1, dtype=torch.float64) for name in "abc"}
    sent = [({"a": 1.0, "b": 1.0}, 1), ({"b": 6.0, "c": 7.0}, 3), ({"c": 9.0}, 3), ({}, 50)]
    updates = [
        Update(at, {name: torch.tensor([value], dtype=torch.float64) for name, value in params.items()}, steps=steps)
        for at, (params, steps) in enumerate(sent)
    ]
    found = FedNova().aggregate(base, updates, {}, 4)[0]
    assert {name: value.item() for name, value in found.items()} == {"a": 1.0, "b": 3.0, "c": 8.0}


def test_equal_steps_are_fedavg_to_the_bit():
    clients = worlds.make_clients((8, 8, 7))
    runs = [simulate(worlds.perceptron, clients, m, SCHEDULE, seed=3) for m in (FedAvg(), FedNova(momentum=0.9))]
    assert worlds.equal(runs[0].params, runs[1].params)


def test_other_rules_see_updates_of_equal_steps():
    updates = [Update(k, vector(10 + move), steps=n) for k, (move, n) in enumerate([(1, 1), (6, 3), (50, 5)])]
    found = FedNova(combine=Median()).aggregate(vector(10), updates, {}, 3)[0]["x"].item()
    assert found == pytest.approx(10 + 3 * 2)  # of 3·1, 3·2 and 3·10


def test_what_cannot_work_is_refused():
    refused(r"FedNova: got client 4 with unknown steps", FedNova().aggregate, vector(1), [Update(4, vector(1))], {}, 1)
    refused(r"Schedule\.momentum: got 0\.9; .*or FedNova\(momentum=0\.9\)", FedNova().check, Schedule())
    refused(r"Schedule\.optimizer: got adamw", FedNova().check, Schedule(momentum=0.0, optimizer="adamw"))
    refused(r"Private\.method", Private, FedNova(), noise=1.0, clip=1.0, per_round=2)
    refused(r"SecureSum\.method", SecureSum, FedNova())
