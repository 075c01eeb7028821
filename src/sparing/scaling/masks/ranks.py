"""What processes that train one model together must agree on: masks and dense gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def is_distributed(group: Any = None) -> bool:
    """Tell whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def average(gradient: Tensor, group: Any = None) -> Tensor:
    """Return the mean over processes; the argument stays as it is."""
    if not is_distributed(group):
        return gradient
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def places_from_rank_zero(places: Tensor, group: Any = None) -> Tensor:
    """Return the live places of process 0, int64, in every process; each has as many."""
    if not is_distributed(group):
        return places
    sent = places.clone()
    dist.broadcast(sent, group_src=0, group=group)
    return sent


def from_rank_zero(mask: Tensor, group: Any = None) -> Tensor:
    """Return the boolean mask of process 0 in every process."""
    if not is_distributed(group):
        return mask
    sent = mask.to(torch.uint8)  # not every backend broadcasts bool
    dist.broadcast(sent, group_src=0, group=group)
    return sent.to(torch.bool)
