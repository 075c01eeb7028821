"""Which engine runs the clients of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from sparing.errors import UserError, require
from sparing.federated.client.population import Population
from sparing.federated.client.train import Client, ClientSetup
from sparing.federated.engines.batched import Batched, why_not_stacked
from sparing.federated.engines.interface import Engine, Loop
from sparing.federated.engines.stacked import why_not_layered
from sparing.federated.engines.workers import Workers, cores
from sparing.federated.placement import HOST

EngineName = Literal["auto", "loop", "batched", "workers"]
"""``"batched"`` stacks the clients' parameters, ``"workers"`` starts processes, ``"loop"`` does neither."""

# Parameters: above, the loop's matrix products fill a core as well as stacked ones do.
_MAX_STACKED = 1_000_000


def engine_of(
    kind: EngineName, setup: ClientSetup, clients: Sequence[Client], make_model: Callable[[], nn.Module],
    workers: int | None, devices: Sequence[str | torch.device] | None,
) -> Engine:  # fmt: skip
    """Choose and set up an engine; one process trains where the model lies, whatever ``devices`` say."""
    chosen = _chosen(kind, setup, clients, make_model, workers, devices)
    elsewhere = not isinstance(chosen, Workers) and {torch.device(one).type for one in devices or ()} - {
        setup.device.type
    }
    why, do = f"one process trains on the model's own device, {setup.device}", 'pass engine="workers", or devices=None'
    require(not elsewhere, "devices", f'{devices} with engine="{chosen.name}"', why, do)
    return chosen


def _chosen(
    kind: EngineName, setup: ClientSetup, clients: Sequence[Client], make_model: Callable[[], nn.Module],
    workers: int | None, devices: Sequence[str | torch.device] | None,
) -> Engine:  # fmt: skip
    known = get_args(EngineName)
    require(kind in known, "engine", repr(kind), "no such engine", f"pass one of {', '.join(known)}")
    count = cores() if workers is None else workers
    why, do = "only processes take devices in turn", 'pass engine="workers", or devices=None'
    require(devices is None or kind in ("auto", "workers"), "devices", f'with engine="{kind}"', why, do)
    convolves = any(isinstance(module, _ConvNd) for module in setup.model.modules())
    if kind == "batched" or (kind == "auto" and _pays(setup, clients, convolves and workers is not None)):
        return Batched(setup, clients)
    if kind == "workers":
        why, do = (
            "clients that are made when drawn lie in no file that processes share",
            'pass engine="batched" or "loop"',
        )
        require(not isinstance(clients, Population), "engine", "workers", why, do)
        return Workers(setup, clients, make_model, count, devices)
    # Every process would take a share of one device's memory, so there they have to be asked for.
    on_cores = setup.device == HOST or workers is not None
    if kind == "auto" and count > 1 and convolves and on_cores and not isinstance(clients, Population):
        try:
            return Workers(setup, clients, make_model, count, devices)
        except UserError:
            # A model made in a notebook cannot be pickled; the loop sends nothing.
            return Loop(setup, clients)
    return Loop(setup, clients)


def _pays(setup: ClientSetup, clients: Sequence[Client], asked: bool) -> bool:
    """Whether to stack clients: not where processes were asked for; the number of cores decides nothing, for bits."""
    small = sum(p.numel() for p in setup.params.values()) <= _MAX_STACKED
    if not small or asked or why_not_stacked(setup, clients):
        return False
    return not why_not_layered(setup.model, clients[0].inputs)
