"""FedAvg and what every method shares: names, the protocol, means by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.federated import MOON, SCAFFOLD, FedAvg, FedDyn, FedPAN, FedProx, FedSign, Schedule
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Method, Sent, Update
from sparing.federated.server.optimizers import FedAvgM

NAMES = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(),
    "moon": MOON(),
    "feddyn": FedDyn(),
    "fedpan": FedPAN(),
    "scaffold": SCAFFOLD(momentum=0.9),
    "fednova": FedNova(momentum=0.9),
    "ditto": Ditto(),
    "fedsign": FedSign(),
    "own-sign": OwnSign(),
    "hinge": Hinge(),
    "norm-matched-fedsign": NormMatched(FedSign(), [{}] * 100),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_a_value_with_the_whole_protocol(name: str):
    method = NAMES[name]
    assert isinstance(method, Method)
    assert method.name == name
    assert method.stackable == (name != "moon")
    method.check(Schedule())
    with pytest.raises((AttributeError, TypeError)):  # which of them depends on Python's version
        method.any = 1
    if name not in {"fedpan"}:
        model = nn.Linear(2, 2)
        assert method.adapt(model) is model


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_given_is_changed(name: str):
    method = NAMES[name]
    params, x = {"w": torch.ones(3)}, {"w": torch.tensor([2.0, -1.0, 0.0])}
    state, server = method.client_state(params), method.server_state(params)
    before = [v.clone() for vector in [*state.values(), *server.values()] for v in vector.values()]
    sent = Sent(params)
    term = method.begin(sent, state)
    term.add_(x, {"w": torch.zeros(3)}, 0.1)
    if name != "moon":
        assert term.loss(nn.Linear(1, 1), torch.zeros(1), torch.zeros(1)) is None
    new, extras = method.finish(sent, x, state, 3, 0.1)
    method.aggregate(params, [Update(0, x, extras=extras, steps=3)], server, 2)
    assert new.keys() >= state.keys()
    assert params["w"].tolist() == [1, 1, 1]
    assert x["w"].tolist() == [2, -1, 0]
    after = [v for vector in [*state.values(), *server.values()] for v in vector.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_mean_by_hand_uniform_and_by_rows():
    g = {"w": torch.zeros(2)}
    updates = [Update(0, {"w": torch.tensor([1.0, 2.0])}), Update(1, {"w": torch.tensor([3.0, 6.0])})]
    assert FedAvg().aggregate(g, updates, {}, 9)[0]["w"].tolist() == [2, 4]
    updates = [Update(u.client, u.params, weight=[30.0, 10.0][u.client]) for u in updates]
    assert FedAvg().aggregate(g, updates, {}, 9)[0]["w"].tolist() == [1.5, 3]


def test_one_client_comes_back_bit_for_bit():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        g = {"w": torch.zeros(1000, dtype=dtype)}
        found = FedAvg().aggregate(g, [Update(3, {"w": x.to(dtype)}, weight=7.0)], {}, 9)[0]["w"]
        assert torch.equal(found, x.to(dtype))


def test_buffers_integers_take_the_largest_and_server_optimizers_leave_them_alone():
    g = {"running_mean": torch.zeros(2), "num_batches_tracked": torch.tensor(4)}
    sent = [
        Update(0, {}, buffers={"running_mean": torch.tensor([1.0, 2.0]), "num_batches_tracked": torch.tensor(9)}),
        Update(1, {}, buffers={"running_mean": torch.tensor([3.0, 4.0]), "num_batches_tracked": torch.tensor(7)}),
    ]
    for method in (FedAvg(), FedAvg(server=FedAvgM()), FedDyn()):
        found = method.buffers(g, sent)
        assert found["running_mean"].tolist() == [2, 3]
        assert (found["num_batches_tracked"].item(), found["num_batches_tracked"].dtype) == (9, torch.int64)


def test_a_block_is_averaged_over_those_who_sent_it():
    g = {"a": torch.zeros(1), "b": torch.full((1,), 5.0), "c": torch.full((1,), 6.0)}
    updates = [Update(0, {"a": torch.ones(1)}), Update(1, {"a": torch.full((1,), 3.0), "b": torch.ones(1)})]
    found, _, _ = FedAvg().aggregate(g, updates, {}, 2)
    assert [found[name].item() for name in "abc"] == [2, 1, 6]


def test_nobody_and_the_same_client_twice_are_refused():
    with pytest.raises(UserError, match="updates: got 0"):
        FedAvg().aggregate({"w": torch.zeros(1)}, [], {}, 3)
    with pytest.raises(UserError, match=r"client \[4\] twice"):
        FedAvg().aggregate({"w": torch.zeros(1)}, [Update(4, {"w": torch.ones(1)})] * 2, {}, 3)
