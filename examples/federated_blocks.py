"""Federated training in which a client trains and sends one of four middle layers: fewer bytes, and what it costs."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from sparing import federated as fed
from sparing.federated.metrics import Accuracy

digits = load_digits()
inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]
split = fed.dirichlet(labels[train], clients=20, alpha=0.5, seed=0)
clients = [fed.Client(inputs[train][list(rows)], labels[train][list(rows)]) for rows in split.clients]


class Layer(nn.Module):
    """A layer with a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer adds."""
        return x + torch.relu(self.linear(x))


def net() -> nn.Module:
    """64 pixels, four equal layers that may be drawn, ten classes; the first and the last always train."""
    return nn.Sequential(nn.Linear(64, 64), *(Layer() for _ in range(4)), nn.Linear(64, 10))


for blocks in (None, 2, 1):
    schedule = fed.Schedule(rounds=8, participation=0.2, local_epochs=2, batch_size=16, lr=0.05, blocks=blocks)
    run = fed.simulate(net, clients, fed.FedAvg(), schedule, seed=0, evaluate=Accuracy(inputs[test], labels[test]))
    last = run.record[-1]
    sent = sum(row["bytes_up"] for row in run.record) / 1e6
    drawn = "all four layers" if blocks is None else f"{blocks} of four layers"
    print(f"{drawn:16s} {sent:5.2f} MB sent by clients in {schedule.rounds} rounds, accuracy {last['accuracy']:.3f}")
