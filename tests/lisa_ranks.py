"""What each of two processes does in ``distributed/test_layersample_ranks.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparing.errors import UserError
from sparing.layersample import Adaptive, Importance, LayerSampling, Reshuffle, Sampler, StepInBackward

WORLD, STEPS, WIDTH = 2, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ALONE = {"embed": False, "head": False, "tail": False}
MISA = {"units": "module", "active": 0, "budget": 0.4, "sampler": Importance(eta=1e3), "state": "reset_all", **ALONE}


def settings(**changes) -> LayerSampling:
    return LayerSampling(**{"active": 1, "period": 2, "sampler": Reshuffle(), **changes})


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Eight rows for a step, or the four of one rank."""
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    return rows if rank is None else rows.chunk(WORLD)[rank]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model: nn.Module, optimizer, sampler: Sampler, *, rank: int | None = None, reduce: bool = False) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        sampler.begin_step(step)
        model(batch(step, rank, dtype)).square().mean().backward()
        if reduce:
            sampler.all_reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, list[float]]:
    full = {n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return {name: p.flatten().tolist() for name, p in full.items()}


def one_process(**changes) -> dict:
    model = Net()
    optimizer = adamw(model)
    sampler = Sampler(model, optimizer, settings(**changes), seed=1)
    train(model, optimizer, sampler)
    return {"weights": weights(model), "history": sampler.history}


def manual(rank: int, **changes) -> dict:
    """Data parallel by ``all_reduce_gradients``, counting what is sent."""
    model = Net()
    optimizer = adamw(model)
    sampler = Sampler(model, optimizer, settings(**changes), seed=1)
    sent: list[int] = []
    real = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: object, **options: object) -> object:
        if tensor.dtype == torch.float64:
            sent.append(tensor.numel())
        return real(tensor, *args, **options)

    dist.all_reduce = counting
    try:
        train(model, optimizer, sampler, rank=rank, reduce=True)
    finally:
        dist.all_reduce = real
    active = sum(p.numel() for p in sampler.trainable.values())
    return {"weights": weights(model), "history": sampler.history, "sent": sent, "active": active}


def sharded(dtype: torch.dtype = torch.float64, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    model, mesh = Net(dtype), init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def fsdp(rank: int, **changes) -> dict:
    model = sharded()
    optimizer = adamw(model)
    sampler = Sampler(model, optimizer, settings(**changes), seed=1)
    train(model, optimizer, sampler, rank=rank)
    stateful = {n for n, p in model.named_parameters() if p in optimizer.state}
    return {
        "weights": weights(model),
        "history": sampler.history,
        "stateful": sorted(stateful),
        "trainable": sorted(sampler.trainable),
    }


def mixed(rank: int, *, refresh: bool = True) -> dict:
    """bf16 compute on fp32 shards: blocks that were frozen in the first forward pass wake later."""
    from sparing.layersample import ranks

    real = ranks.refresh_mixed_precision_
    ranks.refresh_mixed_precision_ = real if refresh else lambda modules: None
    model = sharded(torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = adamw(model)
    before = weights(model)
    try:
        train(model, optimizer, Sampler(model, optimizer, settings(), seed=1), rank=rank)
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        ranks.refresh_mixed_precision_ = real
    after = weights(model)
    return {"error": None, "moved": sorted(n for n in after if after[n] != before[n])}


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def refusals(rank: int) -> dict[str, str | None]:
    def sampler(model: nn.Module, **options) -> Sampler:
        return Sampler(model, adamw(model), settings(**options.pop("settings", {})), **options)

    plain, shards = Net(), sharded()
    shards_sampler = sampler(shards)
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    return {
        "other seeds": refusal(lambda: sampler(plain, seed=rank).begin_step(0)),
        "other seeds, alone": refusal(lambda: sampler(plain, seed=rank, group=alone).begin_step(0)),
        "ddp": refusal(lambda: sampler(nn.parallel.DistributedDataParallel(Net()))),
        "not averaged": refusal(lambda: train(plain, (own := sampler(plain)).optimizer, own, rank=rank)),
        "ddp later": refusal(lambda: wrapped_later(rank)),
        "masters": refusal(lambda: sampler(sharded(), settings={"masters": True})),
        "reduce": refusal(shards_sampler.all_reduce_gradients),
        "matrices": refusal(lambda: sampler(sharded(), settings=MISA)),
        "probe": refusal(lambda: sampler(sharded(), settings={"probe": 2, "sampler": Adaptive()})),
        "step in backward": refusal(lambda: StepInBackward(shards_sampler)),
    }


def wrapped_later(rank: int) -> None:
    """``DistributedDataParallel`` around a model under the sampler reduces what trained at that moment, for ever."""
    model = Net()
    optimizer = adamw(model)
    sampler = Sampler(model, optimizer, settings(), seed=1)
    sampler.begin_step(0)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    train(wrapped, optimizer, sampler, rank=rank)


def uneven(rank: int) -> dict:
    """A weight that only the first process used, and one that nobody did."""
    model = Net()
    sampler = Sampler(model, adamw(model), settings(), seed=1)
    sampler.begin_step(0)
    if rank == 0:
        model.head.bias.grad = torch.tensor([3.0], dtype=torch.float64)
    sampler.all_reduce_gradients()
    return {"head.bias": model.head.bias.grad.item(), "nobody": model.head.weight.grad is None}


def work() -> dict[str, Any]:
    """Every scenario in one of the processes."""
    rank = dist.get_rank()
    return {
        "manual": manual(rank),
        "adaptive": manual(rank, sampler=Adaptive(temperature=0.1)),
        "misa": manual(rank, **MISA),
        "fsdp reset": fsdp(rank),
        "fsdp keep": fsdp(rank, state="keep"),
        "fsdp offload": fsdp(rank, state="offload"),
        "fsdp truncated": fsdp(rank, embed=False),
        "fsdp adaptive": fsdp(rank, sampler=Adaptive(temperature=0.1)),
        "refusals": refusals(rank),
        "uneven": uneven(rank),
        "mixed": mixed(rank),
        "mixed without refresh": mixed(rank, refresh=False),
    }
