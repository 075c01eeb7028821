"""What is foretold from shapes alone, against what a run counts."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sparing.federated import Client, simulate
from sparing.federated.client.train import batches, client_setup, count_steps
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.settings import Schedule
from sparing.jobs.federate.methods import method_of
from sparing.jobs.federate.nets import net, sparse
from sparing.jobs.federate.settings import ON_LORA, MethodName, Settings
from sparing.jobs.federate.tables import price
from sparing.seeds import stream

SIZES = (9, 4, 13, 5)


def clients_of():
    source = torch.Generator().manual_seed(0)
    return [Client(torch.randn(n, 1, 8, generator=source), torch.arange(n) % 3) for n in SIZES]


@pytest.mark.parametrize("name", [name for name in get_args(MethodName) if name not in {"norm-matched", *ON_LORA}])
@pytest.mark.parametrize(("which", "blocks"), [("mlp", None), ("cnn-bn", 1)])
def test_every_byte_and_step_is_foretold(name, which, blocks):
    settings = Settings(methods=(name,), momentum=0.0)
    schedule = Schedule(rounds=3, participation=0.5, local_epochs=1, batch_size=4, momentum=0.0, blocks=blocks)
    make, method = net(which, (1, 8), 3), method_of(name, settings)
    known = price(make, method, schedule, SIZES, seed=5)
    rows = simulate(make, clients_of(), method, schedule, seed=5, engine="loop").record
    assert [row["bytes_down"] for row in rows] == list(known.down)
    assert [row["bytes_up"] for row in rows] == list(known.up)
    assert (sum(row["steps"] for row in rows), sum(row["answered"] for row in rows)) == (known.steps, known.updates)
    subsample = sum(known.up) < sum(known.up_full)
    assert subsample == (blocks is not None)


def test_bytes_of_a_sparse_net_are_foretold_with_its_masks():
    """A mask travels as a buffer: a byte a weight, beside the four of the weight."""
    schedule = Schedule(rounds=2, participation=0.5, local_epochs=1, batch_size=4)
    dense = net("mlp", (1, 8), 3)
    make = sparse(dense, 1 / 4, seed=0)
    known, whole = (price(one, FedAvg(), schedule, SIZES, seed=5) for one in (make, dense))
    rows = simulate(make, clients_of(), FedAvg(), schedule, seed=5, engine="loop").record
    assert [row["bytes_up"] for row in rows] == list(known.up)
    small = 128  # the plan's hash and the two factors, and what else is no mask
    assert 0 < known.up[0] - whole.up[0] - 2 * 2 * 128 * 128 <= 2 * small


@pytest.mark.parametrize("least", [0, 7])
@pytest.mark.parametrize("rows", [1, 4, 5, 9, 12])
@pytest.mark.parametrize("which", ["cnn", "cnn-bn"])
def test_steps_are_the_batches_of_the_loop(which, rows, least):
    schedule = Schedule(local_epochs=2, batch_size=4, least_steps=least)
    setup = client_setup(net(which, (1, 8), 3)(), FedAvg(), schedule)
    made = list(batches(rows, schedule, stream(0, "x"), normed=which == "cnn-bn"))
    assert count_steps(rows, schedule, normed=bool(setup.norms)) == len(made)


def test_the_bytes_of_a_perceptron_by_hand():
    known = price(net("mlp", (40,), 10), FedAvg(), Schedule(rounds=2, participation=0.5), (3, 3, 3, 3), seed=0)
    weights = 40 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 10 + 10
    assert (known.parameters, known.down, known.up) == (weights, (8 * weights,) * 2, (8 * weights,) * 2)
