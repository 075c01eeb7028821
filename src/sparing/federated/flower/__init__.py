"""Federated methods on Flower: one client rule, in its simulator, its deployment, and in this process.

    from sparing.federated import flower

    app = flower.client_app(method, make_model, data_of, schedule)               # in client_app.py
    server = flower.strategy(method, schedule, make_model, clients=10)           # in server_app.py
    server.start(grid, server.initial_arrays())                                  # the rounds that are left

Flower is an extra, ``pip install 'sparing[flower]'``, and is imported when a name of this module is first used; its
telemetry and update check are then off, unless the environment turns them on.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from sparing.errors import UserError

if TYPE_CHECKING:
    from sparing.federated.flower.client import client_app
    from sparing.federated.flower.deploy import Deployment, end_process
    from sparing.federated.flower.grid import FlowerRun, InProcessGrid, run_in_process
    from sparing.federated.flower.keys import certificates, node_key
    from sparing.federated.flower.mods import sign_telemetry
    from sparing.federated.flower.rounds import FlowerRound
    from sparing.federated.flower.server import MethodStrategy, strategy

__all__ = [
    "Deployment",
    "FlowerRound",
    "FlowerRun",
    "InProcessGrid",
    "MethodStrategy",
    "certificates",
    "client_app",
    "end_process",
    "node_key",
    "run_in_process",
    "sign_telemetry",
    "strategy",
]

_HOMES = {
    "Deployment": "deploy",
    "FlowerRound": "rounds",
    "FlowerRun": "grid",
    "InProcessGrid": "grid",
    "MethodStrategy": "server",
    "certificates": "keys",
    "client_app": "client",
    "end_process": "deploy",
    "node_key": "keys",
    "run_in_process": "grid",
    "sign_telemetry": "mods",
    "strategy": "server",
}


def __getattr__(name: str) -> Any:
    """Import Flower, then the module that has the name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_flower()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def _import_flower() -> None:
    """Import Flower quietly: no calls to the network, no warnings about the packages below it."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("flwr.clientapp")
            importlib.import_module("flwr.serverapp.strategy")
    except ImportError as error:
        why = "flwr is an extra of sparing"
        raise UserError("Flower", got=str(error), why=why, do="pip install 'sparing[flower]'") from error
