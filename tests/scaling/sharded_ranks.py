"""What each of two processes does in ``test_sharded.py``: a scaled model under ``fully_shard``."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import GMP, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.fold import fold_
from sparing.scaling.plans.planning import plan

FULL = StateDictOptions(full_state_dict=True)
WORLD, STEPS, WIDTH = 2, 9, 23  # an odd width: the parts of the two processes differ in size
CASES = {
    "static": {},
    "sgd": {"kind": torch.optim.SGD},
    "tensor parallel": {},
    "rigl": {"method": RigL(every=3, share=0.5), "scale": "energy"},
    "gmp": {"method": GMP(final=0.25, start=0.1, every=2), "scale": "density"},
}


def net_of(width: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 2),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model.to(dtype)


def rows(step: int, rank: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Eight rows in two micro-batches; a rank has its half of each."""
    whole = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    return [part if rank is None else part.chunk(WORLD)[rank] for part in whole]


def shard(model: nn.Sequential, *, tensors: bool) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    if tensors:
        parallelize_module(model, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
        return
    for at in (2, 4):
        fully_shard(model[at], mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(case: str, rank: int | None = None, dtype: torch.dtype = torch.float64) -> dict:
    options = {"kind": torch.optim.AdamW, "method": None, "scale": "none", **CASES[case]}
    kind, method, scale = options["kind"], options["method"], options["scale"]
    model = net_of(WIDTH + (case == "tensor parallel"), dtype)  # which torch cuts evenly only
    sgd = kind is torch.optim.SGD
    chosen = plan(
        model, base=net_of(8, dtype), density=1.0 if case == "gmp" else 0.3, init={"*": "constant"},
        optimizer="sgd" if sgd else "adam",
    )  # fmt: skip
    masks = apply_(model, chosen, seed=0)
    if case == "gmp":
        masks.cover_(["2.weight", "4.weight"])
    if rank is not None:
        shard(model, tensors=case == "tensor parallel")
        masks.shard_()
    groups = chosen.groups(model, lr=1e-2, weight_decay=0.1)
    for group in groups if sgd else ():
        group.pop("eps", None)
    optimizer = kind(groups, **({"momentum": 0.9} if sgd else {"foreach": False}))
    evolution = method and Evolution(model, masks, optimizer, method, steps=STEPS, scale=scale)
    data_rank = None if case == "tensor parallel" else rank  # tensor parallelism: each process has all rows
    off = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in rows(step, data_rank, dtype):
            model(micro).square().mean().backward()
        if case != "tensor parallel":  # whose gradients lie on unlike meshes, of which torch takes no norm
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if evolution:
            evolution.step(step)
        off += sum(gate.leaks() for gate in masks.gates)
    masks.check(optimizer)
    state = model.state_dict() if rank is None else get_model_state_dict(model, options=FULL)
    return {
        "state": {name: value.clone() for name, value in state.items()},
        "digest": masks_of(model).digest(),
        "repr": repr(masks),
        "off": off,
        "updates": len(evolution.history) if evolution else 0,
    }


def refusals() -> list[str]:
    """What is said where a step of the sequence is omitted, or a sharded model is to be exported."""

    def sharded(*, follow: bool) -> nn.Module:
        model = net_of(WIDTH)
        masks = apply_(model, plan(model, density=0.5), seed=0)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        if follow:
            masks.shard_()
        return model

    x, whole = torch.ones(2, 6, dtype=torch.float64), net_of(WIDTH)
    calls = (
        apply_(whole, plan(whole, density=0.5), seed=0).shard_,
        lambda: sharded(follow=False)(x),
        lambda: fold_(sharded(follow=True)),
    )
    said = []
    for call in calls:
        try:
            call()
        except UserError as error:
            said.append(str(error))
    return said


def work() -> dict:
    rank = dist.get_rank()
    found = {case: train(case, rank) for case in CASES}
    return {**found, "float32": train("static", rank, torch.float32), "refusals": refusals()}
