"""Losses over several ranks, each of which has a share of the rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparing.jobs.live import device_of, measuring
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import loss_of, loss_sum
from sparing.jobs.lm.packing import Packed
from sparing.jobs.sharded import summed
from sparing.sharding.mesh import Mesh


def held_out_loss(mesh: Mesh, model: nn.Module, data: Packed, *, batch: int = 1) -> tuple[float, int]:
    """``losses.held_out_loss`` by all ranks together, the same on every rank."""
    total = 0.0
    with measuring(model):
        for rows in torch.split(torch.arange(data.rows), batch * mesh.world):
            total += share_loss(model, data, torch.tensor_split(rows, mesh.world)[mesh.rank]).item()
    return summed(mesh, total)[0] / data.tokens, data.tokens


def share_loss(model: nn.Module, data: Packed, rows: Tensor) -> Tensor:
    """Summed loss of some rows in nats; of none it is 0, but takes part in the ranks' collectives."""
    if len(rows):
        return loss_sum(model, data, rows)
    # Collectives wait for all ranks, so a rank without rows runs one row whose labels are all ignored.
    ids = data.ids[:1].to(device_of(model))
    return loss_of(model, ids, torch.full_like(ids, IGNORED))
