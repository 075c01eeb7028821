"""A live model handed to ``fully_shard``, block by block, with our collectives and a plan's levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sparing.blocks import Block, named_parameters, submodule
from sparing.errors import require
from sparing.sharding.engine.masters import OptimizerFactory
from sparing.sharding.engine.state import Settings
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.fsdp.sums import Sums, cuts
from sparing.sharding.fsdp.units import Pass, Unit, flattened, owners_of, placements_of
from sparing.sharding.levels import Plan
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.fsdp import shard_level

ROOTS = "roots"  # the unit of all that is outside of blocks


def fsdp_engine(
    model: nn.Module,
    blocks: Sequence[Block],
    plan: Plan,
    mesh: Mesh,
    settings: Settings,
    factory: OptimizerFactory,
    groups: tuple[Mapping[str, int], Sequence[Mapping[str, Any]]],
) -> FsdpEngine:
    """Shard the blocks, then what is outside of them; the model keeps its names and its forward pass."""
    level, _, os = plan.levels(mesh.tiers)
    over = shard_level(plan, mesh.tiers)
    body = [submodule(model, block.name) for block in blocks if block.role == "body"]
    names, owners, now = {id(p): name for name, p in named_parameters(model).items()}, owners_of(model), Pass()
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    mesh_of = mesh.device_mesh_of(over)
    rows_mesh = mesh_of if os <= over else mesh.device_mesh
    assert rows_mesh is not None
    units: list[Unit] = []
    for at, module in enumerate([*body, model]):
        outside = module is model
        params = {id(p): p for p in flattened(module, body if outside else ())}
        trained = [p for p in params.values() if p.requires_grad]
        shapes = tuple(p.shape for p in trained)
        name = ROOTS if outside else next(b.name for b in blocks if submodule(model, b.name) is module)
        last = at >= len(body) - 1
        fully_shard(
            module, mesh=mesh_of, reshard_after_forward=level > 0 and not last, mp_policy=_precision(trained, settings)
        )
        assert isinstance(module, FSDPModule)
        units.append(
            Unit(
                name=name,
                module=module,
                names=tuple(names[id(p)] for p in trained),
                owners=tuple(owners[id(p)] for p in trained),
                sums=Sums(name, mesh, plan.levels(mesh.tiers)[1:], over, *cuts(mesh, shapes, over)),
                now=now,
                mesh=rows_mesh,
                placements=placements_of(os, over),
                shapes=shapes,
            )
        )
    units.insert(0, units.pop())
    for unit in units:
        unit.plug_(over)
        unit.module.set_reshard_after_backward(level > 0, recurse=False)
    _set_prefetch_(units, settings.prefetch)
    return FsdpEngine(model, plan, mesh, settings, units, now, factory, groups)


def _precision(trained: Sequence[nn.Parameter], settings: Settings) -> MixedPrecisionPolicy:
    """Sums in the optimizer's number format, whatever that of the parameters."""
    kinds = {settings.master_dtype(p.dtype) for p in trained}
    return MixedPrecisionPolicy(reduce_dtype=next(iter(kinds), None), cast_forward_inputs=False)


def _set_prefetch_(units: Sequence[Unit], ahead: int) -> None:
    """Gather blocks ahead: forward the next ones, backward those below that have a backward pass."""
    root, *blocks = (unit.module for unit in units)
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    first = next((at for at, unit in enumerate(units) if unit.names), len(units)) - 1
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + ahead])
        below = [blocks[k] for k in range(at - 1, max(-1, at - 1 - ahead), -1) if k >= first]
        # without any, torch would fetch the block before, wanted or not; itself is whole
        block.set_modules_to_backward_prefetch(below or [block])


def check_fsdp(
    model: nn.Module, blocks: Sequence[Block], mesh: Mesh, settings: Settings, others: Mapping[str, Any]
) -> None:
    """Refuse what ``fully_shard`` cannot do, before anything is changed."""
    do = 'leave engine="fsdp2" out: our own engine takes it'
    for name, value in others.items():
        require(value is None, name, value, "fully_shard has one plan and the types of the model", do)
    require(mesh.tiers < 3, "mesh", f"{mesh.tiers} axes", "fully_shard cuts rows over at most two of them", do)
    inside = {id(submodule(model, block.name)): block for block in blocks if block.role == "body"}
    modules = [submodule(model, block.name) for block in inside.values()]
    kinds: dict[str, set[Any]] = {}
    for block in blocks:
        unit = block.name if block.role == "body" else ROOTS
        for name, p in block.params.items():
            why, got = "fully_shard cuts rows", "a parameter without dimensions"
            require(p.ndim > 0, name, got, why, f"give it the shape (1,), or {do}")
            if p.requires_grad:
                kinds.setdefault(unit, set()).add(p.dtype)
    for unit, found in kinds.items():
        got = " and ".join(sorted(str(kind) for kind in found))
        require(len(found) == 1, unit, got, "fully_shard sends the gradients of a block in one type", do)
    for block, module in zip(inside.values(), modules, strict=True):
        mine = {id(p) for p in block.params.values()}
        shared = [name for name, p in module.named_parameters() if id(p) not in mine]
        why = "fully_shard would cut it twice and train two copies"
        require(not shared, block.name, f"{shared[:1]} that another block holds, too", why, do)
    wire = settings.reduce_dtype
    narrow = [p.dtype for p in model.parameters() if wire not in {None, settings.master_dtype(p.dtype)}]
    require(not narrow, "reduce_dtype", wire, "fully_shard accumulates in the type that it sends", do)
    started, why = dist.is_initialized(), "fully_shard needs one"
    require(started, "engine", "fsdp2 without a process group", why, f"start under torchrun, or {do}")
