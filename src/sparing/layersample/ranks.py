"""What several processes need: proof that all drew the same blocks, and gradients of the active blocks only."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparing.errors import UserError
from sparing.layersample.state import is_sharded


def several(group: Any = None) -> bool:
    """Tell whether more than one process belongs to a group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def assert_agreed(fact: object, shown: object, group: Any = None) -> None:
    """Compare a fact on all processes by its hash, in one reduction of two numbers."""
    if not _agreed(fact, group):
        raise UserError(
            "drawn blocks", got=f"{shown} here and others elsewhere", why="every process must train the same blocks",
            do="pass the same settings, seed and step on every rank",
        )  # fmt: skip


def assert_averaged(params: Iterable[nn.Parameter], group: Any = None) -> None:
    """Refuse gradients that differ between processes: they were not averaged, and the replicas would drift apart.

    ``DistributedDataParallel`` around a model whose blocks were frozen by then does not reduce those that thaw later.
    """
    grads = [p.grad.detach() for p in params if p.grad is not None] if several(group) else []
    sums = torch.stack([g.double().sum().cpu() for g in grads]).tolist() if grads else []
    if not _agreed([x.hex() for x in sums], group):
        raise UserError(
            "gradients", got="others on other processes",
            why="nobody averaged them, so each process would train a model of its own",
            do="call sampler.all_reduce_gradients() before each optimizer step, without DistributedDataParallel",
        )  # fmt: skip


def _agreed(fact: object, group: Any) -> bool:
    """Whether a fact is the same on all processes, by its hash."""
    if not several(group):
        return True
    digest = hashlib.sha256(repr(fact).encode()).digest()
    number = int.from_bytes(digest[:7], "big")  # 7 bytes, so that the number and its negative fit int64
    # one reduction gives both the least number and the negative of the largest
    bounds = torch.tensor([number, -number], device=_device(group))
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
    low, minus_high = bounds.tolist()
    return bool(low == -minus_high)


def mean_over_ranks(values: Tensor, group: Any = None) -> Tensor:
    """Average a small float64 tensor over processes, omitting the NaN entries of single processes."""
    if not several(group):
        return values
    seen = ~values.isnan()
    both = torch.stack([values.nan_to_num(0.0), seen.to(values.dtype)]).to(_device(group))
    dist.all_reduce(both, group=group)
    means: Tensor = both[0].cpu() / both[1].cpu()
    return means


def all_reduce_gradients(params: Mapping[str, nn.Parameter], group: Any = None) -> None:
    """Average gradients over processes, one flat buffer per dtype and device: frozen blocks send nothing.

    Call between the last backward pass and the optimizer's step, on every process. A parameter that got a gradient on
    some processes only counts as zero on the others; one that got none anywhere stays without.
    """
    if not several(group):
        return
    if any(is_sharded(p) for p in params.values()):
        raise UserError(
            "all_reduce_gradients", got="sharded parameters",
            why="fully_shard has reduced their gradients in the backward pass", do="leave the call out",
        )  # fmt: skip
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    # a block that some ranks skipped (LayerDrop) must be reduced by all of them, or the collectives do not match
    present = torch.tensor([p.grad is not None for p in params.values()], dtype=torch.int32, device=_device(group))
    dist.all_reduce(present, group=group)
    for p in compress(params.values(), present.tolist()):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        buckets[p.grad.dtype, p.grad.device].append(p.grad)
    for grads in buckets.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = torch.split(flat, [g.numel() for g in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def refresh_mixed_precision_(modules: Iterable[nn.Module]) -> None:
    """Let sharded blocks that were frozen in their first forward pass learn their gradient dtype.

    ``fully_shard`` resolves the dtypes of a group from the parameters that train at that moment; a group with none
    keeps "no dtype" and its first gradient, in ``param_dtype``, then cannot be assigned to its parameter. Gathering a
    group resolves them again: one all-gather for each block that thaws.

    Source: pytorch issue 186998.
    """
    for module in cast("Iterable[Any]", modules):
        module.unshard()
        module.reshard()


def _device(group: Any) -> torch.device:
    backend = str(dist.get_backend(group))
    # "cpu:gloo,cuda:nccl" has both: then a CPU tensor will do
    on_device = "nccl" in backend and "gloo" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
