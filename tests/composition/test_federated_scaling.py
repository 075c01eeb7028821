"""Federated training of a sparse model: exact zeros vote for nobody, and masked weights stay zero in every round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from federated import worlds
from sparing import scaling
from sparing.federated import FedAvg, FedProx, FedSign, Schedule, simulate
from sparing.federated.metrics import pair_agreement

CLIENTS = [worlds.client(rows=8, at=at) for at in range(4)]
SCHEDULE = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.1, weight_decay=0.01)


def net(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def sparse() -> nn.Module:
    model = net(16).double()
    scaling.apply_(model, scaling.plan(model, base=net(8).double(), density=0.25), seed=0)
    return model


def dead() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = sparse()
    return {name: value == 0 for name, value in model.named_parameters() if value.dim() == 2}


@pytest.mark.parametrize("engine", ["loop", "batched", "workers"])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1), FedSign(gamma=0.1)], ids=lambda m: type(m).__name__)
def test_masked_weights_are_zero_after_every_round(method, engine):
    """FedSign pushes along sign(0) = 0: a masked weight feels no force. Stacked copies must keep the mask too."""
    found = simulate(sparse, CLIENTS, method, SCHEDULE, engine=engine, workers=2)
    assert found.engine == engine
    zeros = dead()
    assert sum(int(where.sum()) for where in zeros.values()) > 150
    for name, where in zeros.items():
        assert bool((found.params[name][where] == 0).all())
        assert bool((found.params[name][~where] != 0).all())


def test_zeros_are_left_out_of_the_share_of_equal_signs():
    """By hand: of six places two have a zero on a side; of the other four, three agree."""
    a = {"w": torch.tensor([1.0, -2.0, 0.0, 3.0, -1.0, 0.0])}
    b = {"w": torch.tensor([2.0, -1.0, 5.0, -3.0, -9.0, 0.0])}
    assert pair_agreement([a, b]) == pytest.approx(3 / 4)


def test_the_record_of_a_sparse_run_counts_live_weights_only():
    """One client: its model after the round is the new global model, compared sign by sign with the one before."""
    schedule = Schedule(rounds=1, participation=1.0, local_epochs=1, batch_size=4, lr=0.1)
    found = simulate(sparse, CLIENTS[:1], FedAvg(), schedule, engine="loop")
    start = simulate(sparse, CLIENTS[:1], FedAvg(), Schedule(rounds=1, participation=1.0, lr=1e-300), engine="loop")
    pairs = [(start.params[name].sign(), value.sign()) for name, value in found.params.items()]
    alive = sum(int(((p != 0) & (q != 0)).sum()) for p, q in pairs)
    alike = sum(int(((p == q) & (p != 0)).sum()) for p, q in pairs)
    assert found.record[0]["ssr_global"] == pytest.approx(alike / alive, abs=1e-9)
