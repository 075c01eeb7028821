"""What each of two processes does in ``test_ranks.py``."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_

WORLD, STEPS = 2, 9
METHODS = {"static": None, "rigl": RigL(every=3, share=0.5), "set": SET(every=3, share=0.5)}
METHODS |= {f"sparse {name}": METHODS[name] for name in ("rigl", "set")}


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def batch(step: int, rank: int | None) -> torch.Tensor:
    """Eight rows for a step, or the four of one rank."""
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows if rank is None else rows.chunk(WORLD)[rank]


def train(name: str, rank: int | None = None) -> dict:
    """Give each rank another seed; train with gradients averaged by torch, masks by us."""
    model, method = net(), METHODS[name]
    chosen = plan(model, density=0.25)
    seed = 3 if rank is None else 3 + rank
    masks = apply_(model, chosen, seed=seed)
    first = masks.digest()
    sparse = name.startswith("sparse")
    wrapped = model if rank is None or sparse else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(chosen.groups(wrapped, lr=1e-2), foreach=False)
    evolution = method and Evolution(wrapped, masks, optimizer, method, steps=STEPS, seed=seed)
    if sparse:
        convert_(model, masks, backend="csr", optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        for p in model.parameters() if sparse and rank is not None else ():
            dist.all_reduce(p.grad)
            p.grad /= WORLD
        optimizer.step()
        if evolution:
            evolution.step(step)
    masks.check(optimizer)
    return {
        "first": first,
        "last": masks_of(wrapped).digest(),
        "weights": {
            key: value.flatten().tolist() for key, value in model.state_dict().items() if value.is_floating_point()
        },
        "off": sum(int(model.state_dict()[key][~mask].count_nonzero()) for key, mask in masks.items()),
        "updates": len(evolution.history) if evolution else 0,
    }


def work() -> dict:
    """Every scenario in one of the processes."""
    return {name: train(name, dist.get_rank()) for name in METHODS}
