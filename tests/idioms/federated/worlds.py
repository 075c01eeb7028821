"""Clients, models and methods of the suite, in float64."""

from __future__ import annotations

import torch
from torch import nn

from sparing.federated import MOON, SCAFFOLD, Client, FedAvg, FedDyn, FedPAN, FedProx, FedSign, Schedule
from sparing.federated.methods.controls import Hinge, OwnSign
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fednova import FedNova
from sparing.seeds import stream

METHOD = {
    "FedAvg": FedAvg(), "FedProx": FedProx(mu=0.3), "MOON": MOON(mu=0.5), "FedDyn": FedDyn(alpha=0.2),
    "FedPAN": FedPAN(), "SCAFFOLD": SCAFFOLD(momentum=0.5), "FedNova": FedNova(momentum=0.5),
    "Ditto": Ditto(lam=0.3), "FedSign": FedSign(gamma=0.05), "own-sign": OwnSign(gamma=0.05),
    "hinge": Hinge(gamma=0.05),
}  # fmt: skip

SCHEDULE = Schedule(rounds=2, participation=1.0, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01)


class Tied(nn.Module):
    """The first layer's weight again, turned round."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.inside.weight

    def forward(self, x):
        return self.out(torch.tanh(self.inside(x)))


def masked():
    """Half of the first weights are zero and stay it, by a hook on the gradient."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    mask = (torch.arange(18).view(6, 3) % 2).double()
    model[0].weight.data.mul_(mask)
    model[0].weight.register_hook(lambda grad: grad * mask)
    return model


def frozen():
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def perceptron():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def normed():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


MODEL = {
    "perceptron": perceptron, "batch norm": normed, "tied weights": lambda: Tied().double(), "masked weights": masked,
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)).double(),
    "a frozen layer": frozen,
}  # fmt: skip


def client(rows, at):
    source = stream(3, "idioms", at)
    inputs = torch.randn(rows, 3, generator=source, dtype=torch.float64)
    return Client(inputs, inputs.argmax(1))


CLIENTS = [client(rows, at) for at, rows in enumerate((8, 10, 9, 8, 11, 8))]


def require_same(found, expected):
    """Equal names and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def max_difference(found, expected):
    """Largest difference of two vectors."""
    assert found.keys() == expected.keys()
    return max((float((value - expected[name]).abs().max()) for name, value in found.items()), default=0.0)
