"""Ditto: both of a client's models against a plain loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from federated import worlds
from refusals import refused
from sparing.errors import RunError
from sparing.federated.client.train import initial_model, personal_order, row_order
from sparing.federated.embedded import simulate
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.ditto import Ditto, ditto_of
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Sent
from sparing.federated.methods.private import Private
from sparing.federated.settings import Schedule, rate_at, sample_clients

CLIENTS = worlds.make_clients((5, 16, 9, 40))
SCHEDULE = Schedule(rounds=5, participation=0.5, local_epochs=2, batch_size=4, lr=0.2, warmup_rounds=2)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_is_algorithm_1(engine: str):
    """w ← mean of the drawn w_k, and v_k by SGD on L_k + (λ/2) ‖v − w‖² around the w that the round began with."""
    run = simulate(worlds.linear, CLIENTS, Ditto(lam=0.4), SCHEDULE, seed=3, engine=engine)
    w = initial_model(Ditto(), worlds.linear, 3).weight.detach().numpy()
    v = dict.fromkeys(range(4), w)
    for number in range(SCHEDULE.rounds):
        ends, drawn = [], sample_clients(SCHEDULE, 4, number, 3)
        for k in drawn:
            ends.append(worlds.linear_steps(w, CLIENTS[k], SCHEDULE, row_order(3, number, k), number=number)[1])
            _, v[k] = worlds.linear_steps(
                v[k], CLIENTS[k], SCHEDULE, personal_order(3, number, k), lambda x, w=w: 0.4 * (x - w), number
            )
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(run.params["weight"].numpy(), w, rtol=0, atol=1e-13)
    assert set(run.state.clients) == {k for at in range(5) for k in sample_clients(SCHEDULE, 4, at, 3)}
    for k, state in run.state.clients.items():
        np.testing.assert_allclose(state["personal"]["weight"].numpy(), v[k], rtol=0, atol=1e-13)
    assert rate_at(SCHEDULE, 0) != rate_at(SCHEDULE, 2)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_model_of_ones_own_that_diverges_is_named(engine: str):
    """lr · λ = 0.2 · 1e200: the spring throws it to infinity, and the global model knows nothing of it."""
    everybody = Schedule(rounds=1, participation=1.0, local_epochs=2, batch_size=4, lr=0.2)
    with pytest.raises(RunError, match="its own model diverged"):
        simulate(worlds.linear, CLIENTS, Ditto(lam=1e200), everybody, seed=3, engine=engine)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_global_model_is_fedavgs_to_the_bit(engine: str):
    runs = [simulate(worlds.normed, CLIENTS, m, SCHEDULE, seed=3, engine=engine) for m in (FedAvg(), Ditto())]
    assert worlds.equal(runs[0].params, runs[1].params)
    assert worlds.equal(runs[0].buffers, runs[1].buffers)
    drop = {"seconds", "clients_per_second"}
    rows = [[{k: v for k, v in row.items() if k not in drop} for row in run.record] for run in runs]
    assert rows[0] == rows[1]


def test_batch_norm_of_a_clients_own_model_is_its_own():
    """Stacked or not; and its counts are of its own batches, two rounds of which a client has seen."""
    loop, batched = [
        simulate(worlds.normed, CLIENTS, Ditto(lam=0.4), SCHEDULE, seed=3, engine=kind) for kind in ("loop", "batched")
    ]
    sent = Sent(loop.params, buffers=loop.buffers)
    for k, state in loop.state.clients.items():
        params, buffers = Ditto().personal(state, sent)
        theirs = Ditto().personal(batched.state.clients[k], sent)
        assert worlds.max_difference(params, theirs[0]) < 1e-12
        assert worlds.max_difference(buffers, theirs[1]) < 1e-12
        assert not worlds.equal(buffers, loop.buffers)


def test_a_method_around_it_keeps_the_models():
    private = Private(Ditto(lam=0.4), noise=0.0, clip=1e9, per_round=2, seed=3)
    around = simulate(worlds.linear, CLIENTS, private, SCHEDULE, seed=3)
    plain = simulate(worlds.linear, CLIENTS, Ditto(lam=0.4), SCHEDULE, seed=3)
    assert ditto_of(NormMatched(Private(Ditto(), noise=1, clip=1, per_round=1), [])) == Ditto()
    assert ditto_of(Private(FedAvg(), noise=1, clip=1, per_round=1)) is None
    for k, state in plain.state.clients.items():
        assert worlds.max_difference(state["personal"], around.state.clients[k]["personal"]) < 1e-12


def test_batch_norm_over_all_batches_is_not_stacked():
    def averaging():
        model = worlds.normed()
        model[1].momentum = None
        return model

    refused("has counted others in clients' own", simulate, averaging, CLIENTS, Ditto(), SCHEDULE, engine="batched")
    assert simulate(averaging, CLIENTS, FedAvg(), SCHEDULE, engine="batched").engine == "batched"


def test_what_cannot_work_is_refused():
    refused(r"Ditto\.lam: got -1", Ditto, lam=-1)
