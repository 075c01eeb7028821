"""Who holds which rows: the split of a run, and its clients."""

from __future__ import annotations

import torch

from sparing.errors import UserError, require
from sparing.federated import Client, dirichlet
from sparing.federated.splits import Split, natural, shards
from sparing.jobs.federate.inputs import Inputs
from sparing.jobs.federate.settings import Settings
from sparing.seeds import stream


def split_of(rows: Inputs, settings: Settings) -> Split:
    """Partition the training rows; no client is empty."""
    seed, clients = settings.seed, settings.clients
    enough = len(rows.targets) >= rows.classes
    got = f"{len(rows.targets)} training rows of {rows.classes} classes"
    require(enough, "data", got, "there are more classes than rows", "pass more --rows, or less --validation")
    if settings.split == "natural":
        if rows.groups is None:
            why, do = f"the rows of {rows.name} belong to nobody", "pass a .safetensors file with groups, or dirichlet"
            raise UserError("split", got="natural", why=why, do=do)
        return natural(rows.groups)
    require(clients <= len(rows.targets), "clients", clients, f"there are only {len(rows.targets)} rows", "pass fewer")
    if settings.split == "iid":
        # Sorted within a client: which rows it holds is random, their order is that of the data set.
        order = torch.randperm(len(rows.targets), generator=stream(seed, "federate", "iid"))
        return Split(tuple(tuple(sorted(part.tolist())) for part in order.tensor_split(clients)), "iid", None, seed)
    if settings.split == "shards":
        return shards(rows.targets, clients, per_client=settings.shards, seed=seed)
    return dirichlet(rows.targets, clients, settings.alpha, rule=settings.rule, seed=seed)


def clients_of(rows: Inputs, split: Split) -> list[Client]:
    """The clients of a split."""
    return [Client(rows.inputs[list(part)], rows.targets[list(part)]) for part in split.clients]
