"""SCAFFOLD: control variates by hand, and the way of SGD with momentum by running it."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.federated.methods.interface import Sent, Update
from sparing.federated.methods.scaffold import SCAFFOLD, effective_steps
from sparing.federated.server.optimizers import Replace
from sparing.federated.server.robust import Clipped, Median
from sparing.federated.settings import Schedule


def vector(*values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values, dtype=torch.float64)}


def test_gradient_by_hand():
    """∇L + c − c_k = 10 + 2 − 5; before the first round there is no c."""
    state, grads = {"control": vector(5)}, vector(10)
    SCAFFOLD().begin(Sent(vector(0), {"control": vector(2)}), state).add_(vector(1), grads, 0.1)
    assert grads["x"].item() == 7
    grads = vector(10)
    SCAFFOLD().begin(Sent(vector(0)), state).add_(vector(1), grads, 0.1)
    assert grads["x"].item() == 5


def test_control_variates_by_hand():
    """c_k' = c_k − c + (g − x)/(n η) = 5 − 2 + (4 − 1)/(6 · 0.25) = 5; the change is 0. For x = −2: c_k' = 7, change 2.
    Two of eight took part: c = 2 + 2/8 · (0 + 2)/2 = 2.25."""
    method, sent = SCAFFOLD(), Sent(vector(4), {"control": vector(2)})
    updates = []
    for client, x in enumerate([1.0, -2.0]):
        state, extras = method.finish(sent, vector(x), {"control": vector(5)}, 6, 0.25)
        assert state["control"]["x"].item() == [5, 7][client]
        updates.append(Update(client, vector(x), weight=client + 1.0, extras=extras))
    params, state, extras = method.aggregate(vector(4), updates, {"control": vector(2)}, 8)
    assert params["x"].item() == -1  # weighted: (1 − 2·2)/3; the mean of the changes is uniform
    assert state["control"]["x"].item() == extras["control"]["x"].item() == 2.25
    half = SCAFFOLD(server=Replace(lr=0.5)).aggregate(vector(4), updates, {"control": vector(2)}, 8)
    assert half[0]["x"].item() == 4 + 0.5 * (-1 - 4)


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.9), (7, 0.9), (20, 0.5), (5, 0.0)])
def test_the_way_is_that_of_torch(steps: int, momentum: float):
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=momentum)
    for _ in range(steps):
        x.grad = torch.ones_like(x)
        optimizer.step()
    assert -x.item() / 0.1 == pytest.approx(effective_steps(steps, momentum), rel=1e-12)


def test_what_did_not_train_stays():
    both = {**vector(4), "y": torch.ones(1)}
    method, sent = SCAFFOLD(), Sent(both, {"control": {**vector(2), "y": torch.ones(1)}})
    old = {"control": {**vector(5), "y": torch.full((1,), 8.0)}}
    state, extras = method.finish(sent, vector(1), old, 6, 0.25)
    assert (state["control"]["y"].item(), list(extras["control"])) == (8, ["x"])
    _, server, _ = method.aggregate(both, [Update(0, vector(1), extras=extras)], sent.extras, 2)
    assert server["control"]["y"].item() == 1
    idle, extras = method.finish(sent, both, old, 0, 0.25)
    assert (idle, extras["control"]["x"].item()) == (old, 0)


def test_a_hostile_control_variate_does_not_pass_the_median():
    updates = [Update(k, vector(0), extras={"control": vector(v)}) for k, v in enumerate([1.0, 2.0, 1e9])]
    method = SCAFFOLD(combine=Median())
    _, state, _ = method.aggregate(vector(0), updates, method.server_state(vector(0)), 6)
    assert state["control"]["x"].item() == 0.5 * 2


def test_schedules_that_break_it_are_refused():
    SCAFFOLD(momentum=0.9).check(Schedule())
    refused(r"Schedule\.momentum: got 0\.9; .*or SCAFFOLD\(momentum=0\.9\)", SCAFFOLD().check, Schedule())
    refused(r"Schedule\.optimizer: got adamw", SCAFFOLD().check, Schedule(momentum=0.0, optimizer="adamw"))
    refused(r"Schedule\.clip", SCAFFOLD().check, Schedule(momentum=0.0, clip=1.0))
    refused(r"SCAFFOLD\.combine", SCAFFOLD(combine=Clipped(1.0)).check, Schedule(momentum=0.0))
