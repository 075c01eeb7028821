"""Federated learning: clients train on data that stays with them, a server averages their models.

A method is a value: FedAvg, FedProx, MOON, FedDyn, FedPAN, SCAFFOLD, and FedSign, which pushes along the signs of the
global model. ``Schedule`` holds what is the same for all, and ``simulate`` runs them in one process. Controls for
FedSign are in ``controls``, server optimizers in ``servers``, means that survive wrong clients in ``robust``, ways to
divide data in ``splits``.

Li et al., "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks", NeurIPS 2024 (arXiv:2405.12489).

    split = dirichlet(labels, clients=100, alpha=0.5, seed=0)
    clients = [Client(inputs[list(rows)], labels[list(rows)]) for rows in split.clients]
    run = simulate(make_model, clients, FedSign(gamma=0.01), Schedule(rounds=100))
"""

from sparing.federated.embedded import simulate
from sparing.federated.fedavg import FedAvg
from sparing.federated.feddyn import FedDyn
from sparing.federated.fedpan import FedPAN
from sparing.federated.fedprox import FedProx
from sparing.federated.fedsign import FedSign
from sparing.federated.loop import Client
from sparing.federated.moon import MOON
from sparing.federated.scaffold import SCAFFOLD
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
    "Schedule",
    "dirichlet",
    "simulate",
]
