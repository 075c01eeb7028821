"""What both sides share: model, method, schedule, and each client's rows."""

import torch
from torch import nn

from sparing.federated.client.train import Client
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Method
from sparing.federated.settings import Schedule
from sparing.seeds import stream


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def rows_of(client: int, count: int = 90, purpose: str = "rows") -> Client:
    """Return a client's own rows; put the reading of your data here."""
    draw = stream(0, purpose, client)
    inputs = torch.randn(count, 8, generator=draw) + 0.1 * client
    return Client(inputs, inputs[:, :3].argmax(1))


def held_of(client: int) -> Client:
    """Return rows of the client that it does not train on."""
    return rows_of(client, 30, "held")


def settings_of(config: dict) -> tuple[Method, Schedule]:
    gamma = float(config["gamma"])
    method = FedSign(gamma=gamma) if gamma else FedAvg()
    schedule = Schedule(
        rounds=int(config["rounds"]), participation=float(config["participation"]), local_epochs=1, batch_size=16
    )
    return method, schedule
