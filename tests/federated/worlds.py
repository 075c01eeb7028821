"""Small models, clients and losses for tests of federated training; importable, so that workers find them."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn

from sparing.federated.client.train import Client, batches
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.settings import rate_at
from sparing.seeds import stream


def perceptron():
    """3 inputs, 3 classes, float64."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Residual(nn.Module):
    """A parameter outside of a layer, which does not train: stacked by vmap only."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.out(torch.relu(x + self.inside(x)) + self.shift)


def residual():
    return Residual().double()


def normed():
    """With batch norm."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def hooked(make=perceptron):
    """With a hook that changes what a layer gives."""
    model = make()
    model[0].register_forward_hook(double)
    return model


def hooked_normed():
    return hooked(normed)


def double(module, args, output):
    return 2 * output


def dropping():
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def deep():
    """Four body blocks between embed and head."""
    layers = [nn.Linear(3, 3) for _ in range(6)]
    return nn.Sequential(*layers).double()


def convolutional():
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).double()


def client(rows, at=0, shape=(3,)):
    """Normal inputs and classes that depend on them."""
    source = stream(5, "rows", at)
    inputs = torch.randn(rows, *shape, generator=source, dtype=torch.float64)
    return Client(inputs, inputs.flatten(1)[:, :3].argmax(1))


def make_clients(sizes=(7, 12, 5, 9), shape=(3,)):
    return [client(rows, at, shape) for at, rows in enumerate(sizes)]


def equal(a, b):
    """Equal names and bits."""
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def max_difference(a, b):
    """Largest difference of two vectors relative to the largest element."""
    gap = max(float((value - b[name]).abs().max()) for name, value in a.items())
    return gap / max(float(value.abs().max()) for value in a.values())


def killing_loss(outputs, targets):
    """Cross-entropy that ends the process of the client whose rows carry class 2 only."""
    if bool((targets == 2).all()):
        os._exit(3)
    return nn.functional.cross_entropy(outputs, targets)


def failing_loss(outputs, targets):
    """Cross-entropy that raises for class 2 only."""
    if bool((targets == 2).all()):
        raise ArithmeticError("no such\nclass")
    return nn.functional.cross_entropy(outputs, targets)


AVERAGE = FedAvg()


def linear():
    """Softmax regression without a bias, whose gradient is one line."""
    return nn.Linear(3, 3, bias=False).double()


def linear_steps(weight, rows, schedule, source, term=lambda weight: 0.0, number=0):
    """Gradients of a client's steps and where they end, by numpy: v ← βv + ∇L + term, w ← w − η v."""
    x, y = rows.inputs.numpy(), rows.targets.numpy()
    speed, gradients = np.zeros_like(weight), []
    for batch in batches(len(rows), schedule, source, normed=False):
        at = batch.numpy()
        raised = np.exp(x[at] @ weight.T)
        wrong = raised / raised.sum(1, keepdims=True) - np.eye(3)[y[at]]
        gradients.append(wrong.T @ x[at] / len(at) + term(weight))
        speed = schedule.momentum * speed + gradients[-1]
        weight = weight - rate_at(schedule, number) * speed
    return gradients, weight
