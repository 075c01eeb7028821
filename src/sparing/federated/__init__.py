"""Federated learning: clients train on data that stays with them, a server averages their models.

A method is a value: FedAvg, FedProx, MOON, FedDyn, FedPAN, SCAFFOLD, and FedSign, which pushes along the signs of the
global model. ``Schedule`` holds what is the same for all, and ``simulate`` runs them in one process. Controls for
FedSign are in ``controls``, server optimizers in ``optimizers``, means that survive wrong clients in ``robust``,
``defences`` and ``trust``, secure aggregation in ``methods.secure``, exact averages of LoRA in
``methods.lora``, FedNova in ``methods.fednova``, models of clients' own in ``methods.ditto``, ways to divide data in
``splits``.

Li et al., "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks", NeurIPS 2024 (arXiv:2405.12489).

Example:
    >>> import torch
    >>> from functools import partial
    >>> inputs, labels = torch.randn(80, 3), torch.arange(80) % 2
    >>> split = dirichlet(labels, clients=4, alpha=0.5, seed=0)
    >>> clients = [Client(inputs[list(rows)], labels[list(rows)]) for rows in split.clients]
    >>> run = simulate(partial(torch.nn.Linear, 3, 2), clients, FedSign(gamma=0.01), Schedule(rounds=2))
    >>> len(run.record)
    2
"""

from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.private import Private
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.settings import Schedule
from sparing.federated.splits import dirichlet

__all__ = [
    "MOON",
    "SCAFFOLD",
    "Client",
    "FedAvg",
    "FedDyn",
    "FedPAN",
    "FedProx",
    "FedSign",
    "Private",
    "Schedule",
    "dirichlet",
    "simulate",
]
