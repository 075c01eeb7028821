"""FedDyn: its gradient against autograd of the published loss, its states by hand."""

from __future__ import annotations

import numpy as np
import torch

from federated import worlds
from refusals import refused
from sparing.federated.client.train import initial_model, row_order
from sparing.federated.embedded import simulate
from sparing.federated.methods.feddyn import FedDyn, with_rows
from sparing.federated.methods.interface import Sent, Update
from sparing.federated.server.optimizers import FedAdam
from sparing.federated.server.robust import Median
from sparing.federated.settings import Schedule, sample_clients


def vector(*values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values, dtype=torch.float64)}


def test_states_by_hand():
    """α = 0.5, g = 1, clients at 3 and 5 of four: λ = −0.5·2 and −0.5·4; h = −(0.5/4)·(2 + 4) = −0.75;
    g = 4 + 0.75/0.5 = 5.5. Then from 5.5 one client at 4: λ moves by +0.75, h = −0.75 + (0.5/4)·1.5 = −0.5625,
    g = 4 + 1.125."""
    method = FedDyn(alpha=0.5)
    sent, zero = Sent(vector(1)), method.client_state(vector(1))
    first, out = method.finish(sent, vector(3), zero, 5, 0.1)
    second, _ = method.finish(sent, vector(5), zero, 5, 0.1)
    assert [first["lam"]["x"].item(), second["lam"]["x"].item(), out] == [-1, -2, {}]
    state = method.server_state(vector(1))
    g, state, extras = method.aggregate(vector(1), [Update(0, vector(3)), Update(1, vector(5))], state, 4)
    assert [g["x"].item(), state["h"]["x"].item(), extras] == [5.5, -0.75, {}]
    again, _ = method.finish(Sent(g), vector(4), second, 5, 0.1)
    assert again["lam"]["x"].item() == -2 + 0.75
    g, state, _ = method.aggregate(g, [Update(1, vector(4))], state, 4)
    assert [g["x"].item(), state["h"]["x"].item()] == [4 + 1.125, -0.5625]


def test_rows_weigh_in_the_mean_and_not_in_h():
    """Weights 1 and 3: mean 4.5; h as without them: −0.75."""
    method = FedDyn(alpha=0.5)
    updates = [Update(0, vector(3), weight=1), Update(1, vector(5), weight=3)]
    g, state, _ = method.aggregate(vector(1), updates, method.server_state(vector(1)), 4)
    assert [g["x"].item(), state["h"]["x"].item()] == [4.5 + 1.5, -0.75]


def test_blocks_that_did_not_train_stay():
    """Of two tensors one was sent by one client of two, the other by none."""
    method, both = FedDyn(alpha=0.5), {**vector(1), "y": torch.ones(1)}
    state = {"lam": {**vector(7), "y": torch.full((1,), 9.0)}}
    new, _ = method.finish(Sent(both), vector(3), state, 5, 0.1)
    assert [new["lam"]["x"].item(), new["lam"]["y"].item()] == [6, 9]
    g, server, _ = method.aggregate(both, [Update(0, vector(3)), Update(1, {})], method.server_state(both), 2)
    assert [g["x"].item(), g["y"].item()] == [3 + 1, 1]  # h = −0.5/2·2
    assert [server["h"]["x"].item(), server["h"]["y"].item()] == [-0.5, 0]


def test_a_robust_rule_also_bounds_h():
    updates = [Update(k, vector(value)) for k, value in enumerate([2.0, 3.0, 1e9])]
    method = FedDyn(alpha=0.5, combine=Median())
    g, state, _ = method.aggregate(vector(1), updates, method.server_state(vector(1)), 3)
    assert [g["x"].item(), state["h"]["x"].item()] == [3 + 2, -1]


def test_strengths_by_rows_are_those_of_the_authors_code():
    """Their variables in numpy: ∇_k, strength α/w_k with w_k = n_k m/n, loss α_k (‖x‖²/2 + ⟨x, ∇_k − g⟩), server mean
    of the drawn + mean of all ∇_k."""
    clients = worlds.make_clients((5, 16, 9, 40))
    schedule = Schedule(rounds=6, participation=0.5, local_epochs=2, batch_size=4, lr=0.2)
    runs = [
        simulate(worlds.linear, clients, FedDyn(alpha=0.3, weights="size"), schedule, seed=3, engine=kind)
        for kind in ("loop", "batched")
    ]
    g = initial_model(FedDyn(), worlds.linear, 3).weight.detach().numpy()
    nabla = np.zeros((4, *g.shape))
    for number in range(6):
        ended = []
        for k in sample_clients(schedule, 4, number, 3):
            alpha = 0.3 / (len(clients[k]) * 4 / 70)
            _, x = worlds.linear_steps(
                g, clients[k], schedule, row_order(3, number, k),
                lambda x, alpha=alpha, k=k, g=g: alpha * (x + nabla[k] - g),
            )  # fmt: skip
            nabla[k] += x - g
            ended.append(x)
        g = np.mean(ended, axis=0) + nabla.mean(axis=0)
    for run in runs:
        np.testing.assert_allclose(run.params["weight"].numpy(), g, rtol=0, atol=1e-13)


def test_strengths_by_rows_reach_the_optimum_of_all_rows():
    """Quadratic clients: Σ n_k a_k b_k / Σ n_k a_k, from the rows' shares; without them Σ a_k b_k / Σ a_k."""
    a, b, rows = torch.tensor([1.0, 0.5, 2.0]).double(), torch.tensor([3.0, -1.0, 0.0]).double(), [1, 7, 4]
    for weights, counts in (("size", rows), ("uniform", [1, 1, 1])):
        method, g = FedDyn(alpha=0.5, weights=weights), vector(0)
        states = [with_rows(method.client_state(g), lambda n=n: n / 4) for n in rows]
        server = method.server_state(g)
        for _ in range(600):
            sent, updates = Sent(g), []
            for k in range(3):
                term, x = method.begin(sent, states[k]), g["x"].clone()
                for _ in range(20):
                    grad = a[k] * (x - b[k])
                    term.add_({"x": x}, {"x": grad}, 0.05)
                    x = x - 0.05 * grad
                states[k], _ = method.finish(sent, {"x": x}, states[k], 20, 0.05)
                updates.append(Update(k, {"x": x}))
            g, server, _ = method.aggregate(g, updates, server, 3)
        n = torch.tensor(counts).double()
        assert abs(g["x"].item() - float((n * a * b).sum() / (n * a).sum())) < 1e-8


def test_a_client_that_does_not_know_the_rows_is_refused():
    method = FedDyn(weights="size")
    refused(r"FedDyn\.weights.*run it by simulate", method.begin, Sent(vector(1)), method.client_state(vector(1)))


def test_what_cannot_work_is_refused():
    refused(r"FedDyn\.weights: got 'rows'", FedDyn, weights="rows")
    refused(r"FedDyn\.alpha: got 0; the server divides by it", FedDyn, alpha=0)
    refused("leave server= out", FedDyn, server=FedAdam())
    decayed = Schedule(optimizer="adamw", weight_decay=0.1)
    refused(r"Schedule\.weight_decay: got 0\.1 with adamw", FedDyn().check, decayed)
    FedDyn().check(Schedule(optimizer="adamw"))


def test_a_parameter_without_dimensions_has_a_pull_of_its_own_too():
    """α/share · (x − g) with share ½: 2 · 0.5 · 3."""
    g = {"x": torch.tensor(1.0, dtype=torch.float64)}
    method = FedDyn(alpha=0.5, weights="size")
    state, grad = with_rows(method.client_state(g), lambda: 0.5), torch.zeros((), dtype=torch.float64)
    method.begin(Sent(g), state).add_({"x": torch.tensor(4.0, dtype=torch.float64)}, {"x": grad}, 0.1)
    assert float(grad) == 3.0
