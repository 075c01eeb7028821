"""FedDyn: its gradient against autograd of the published loss, its states by hand."""

from __future__ import annotations

import torch

from refusals import refused
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.interface import Sent, Update
from sparing.federated.server.optimizers import FedAdam
from sparing.federated.server.robust import Median
from sparing.federated.settings import Schedule


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


def test_what_cannot_work_is_refused():
    refused(r"FedDyn\.alpha: got 0; the server divides by it", FedDyn, alpha=0)
    refused("leave server= out", FedDyn, server=FedAdam())
    decayed = Schedule(optimizer="adamw", weight_decay=0.1)
    refused(r"Schedule\.weight_decay: got 0\.1 with adamw", FedDyn().check, decayed)
    FedDyn().check(Schedule(optimizer="adamw"))
