"""A client's round against plain SGD written out, its order of rows, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from federated import worlds
from refusals import refused
from sparing.federated.client.train import (
    Client,
    batches,
    buffers_of,
    client_setup,
    load_,
    row_order,
    train,
)
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Sent
from sparing.federated.settings import Schedule
from sparing.seeds import stream


def setup_of(make, schedule, method=worlds.AVERAGE, **options):
    torch.manual_seed(0)
    return client_setup(make(), method, schedule, seed=4, **options)


def start_of(setup):
    params = {name: value.detach().clone() for name, value in setup.params.items()}
    return Sent(params, {}, {name: value.clone() for name, value in buffers_of(setup.model).items()})


def train_one(setup, client, number=0, client_id=2, sent=None, **options):
    return train(setup, client, sent or start_of(setup), {}, number=number, client_id=client_id, **options)


def test_the_term_comes_before_clipping():
    """With a huge penalty the clipped step has the length of the clip, whatever the penalty."""
    schedule = Schedule(local_epochs=1, batch_size=99, lr=1.0, momentum=0.0, clip=0.01)
    setup = setup_of(worlds.perceptron, schedule, FedProx(mu=1e6))
    sent = start_of(setup)
    result = train_one(setup, worlds.client(10), sent=sent)
    moved = torch.cat([(result.update.params[name] - value).flatten() for name, value in sent.params.items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_parameters_with_one_gradient_tensor_are_stepped_each_for_itself():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return (self.a + self.b).expand(len(x), 3)

    schedule = Schedule(local_epochs=1, batch_size=9, lr=1.0, momentum=0.0, weight_decay=0.5)
    setup = setup_of(Sum, schedule)
    sent = Sent({"a": torch.full((3,), 2.0), "b": torch.ones(3)})
    client = Client(torch.zeros(3, 1), torch.tensor([0, 0, 0]))
    result = train_one(setup, client, sent=sent)
    grad = torch.tensor([1 / 3 - 1, 1 / 3, 1 / 3])
    torch.testing.assert_close(result.update.params["a"], 2 - grad - 1)
    torch.testing.assert_close(result.update.params["b"], 1 - grad - 0.5)


@pytest.mark.parametrize(
    ("rows", "options", "sizes"),
    [
        (7, {"local_epochs": 2, "batch_size": 3}, [3, 3, 1, 3, 3, 1]),
        (2, {"local_epochs": 1, "batch_size": 3, "least_steps": 3}, [2, 2, 2]),
        (4, {"local_epochs": 1, "batch_size": 3, "least_steps": 3}, [3, 1, 3]),
        (4, {"local_epochs": 1, "batch_size": 3, "least_steps": 1}, [3, 1]),
    ],
)
def test_sizes_of_batches(rows, options, sizes):
    found = list(batches(rows, Schedule(**options), stream(0), normed=False))
    assert [len(one) for one in found] == sizes
    assert sorted(torch.cat(found[: -(-rows // 3)]).tolist()) == list(range(rows))


def test_a_last_single_row_is_dropped_for_batch_norm_alone():
    schedule = Schedule(local_epochs=2, batch_size=3)
    assert [len(one) for one in batches(7, schedule, stream(0), normed=True)] == [3, 3, 3, 3]
    kept = Schedule(local_epochs=1, batch_size=3, drop_last_single=False)
    assert [len(one) for one in batches(7, kept, stream(0), normed=True)] == [3, 3, 1]
    assert [len(one) for one in batches(1, Schedule(local_epochs=1), stream(0), normed=True)] == [1]
    refused("no rows", next, batches(0, schedule, stream(0), normed=False))


def test_orders_belong_to_client_and_round():
    orders = {
        tuple(torch.randperm(50, generator=row_order(1, number, client)).tolist())
        for number in (0, 1)
        for client in (0, 1)
    }
    assert len(orders) == 4


def test_dropout_is_the_clients_own_and_the_global_generator_is_left_alone():
    setup, client = setup_of(worlds.dropping, Schedule(local_epochs=1, batch_size=4)), worlds.client(10)
    sent = start_of(setup)
    before = torch.random.get_rng_state()
    first = train_one(setup, client, sent=sent)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert worlds.equal(first.update.params, train_one(setup, client, sent=sent).update.params)
    assert not worlds.equal(first.update.params, train_one(setup, client, sent=sent, number=1).update.params)


def test_buffers_and_what_a_client_keeps_to_itself():
    local = Schedule(local_epochs=1, batch_size=4, batch_norm="local")
    setup, client = setup_of(worlds.normed, local), worlds.client(9)
    sent = start_of(setup)
    result = train_one(setup, client, sent=sent)
    assert setup.norms == {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var",
                                                         "num_batches_tracked")}  # fmt: skip
    assert result.local_bn.keys() == setup.norms
    assert int(result.update.buffers["1.num_batches_tracked"]) == 2  # nine rows: the last single one is left out
    local_bn = {name: value + 1 for name, value in result.local_bn.items()}
    again = train_one(setup, client, sent=sent, local_bn=local_bn)
    assert int(again.update.buffers["1.num_batches_tracked"]) == 5
    average = setup_of(worlds.normed, Schedule(local_epochs=1, batch_size=4))
    assert train_one(average, client, sent=sent).local_bn == {}


def test_weight_by_size_and_frozen_parameters():
    setup = setup_of(worlds.residual, Schedule(local_epochs=1, weights="size"))
    result = train_one(setup, worlds.client(9))
    assert result.update.weight == 9.0
    assert "shift" not in result.update.params
    refused("no parameter that trains", setup_of, lambda: nn.ReLU(), Schedule())
    refused("no such tensor", load_, setup.model, {"nobody": torch.ones(1)}, {})
