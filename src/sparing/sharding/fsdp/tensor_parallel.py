"""Models behind ``parallelize_module``: ``fully_shard`` cuts the rows of what a rank of tensor parallelism has."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from sparing.errors import require
from sparing.sharding.engine.state import Settings
from sparing.sharding.levels import Plan
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.fsdp import shard_level

TYPED = 'make_mesh(within=mesh["dp"], tensor=mesh["tp"])'


def is_sliced(parameter: nn.Parameter) -> bool:
    """Whether ranks of tensor parallelism have several parts of it."""
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def check_parts(
    model: nn.Module, mesh: Mesh, engine: str, settings: Settings, *, dtype: object, offload: object
) -> None:
    """Refuse settings that stages of a pipeline do not take, and DTensors that the engine or the mesh does not."""
    scaled, why = settings.loss_scale is not None, "a stage would scale again what comes scaled from the next one"
    do = "leave it out, and train in bfloat16"
    require(not (mesh.stages and scaled), "loss_scale", f"{settings.loss_scale}, in stages", why, do)
    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if mesh.tensor is None and not found:
        return
    name = next(iter(found), "model")
    why = "our own engine cuts flat tensors, and knows nothing of tensor parallelism"
    do = f"pass engine='fsdp2' and {TYPED}"
    require(engine == "fsdp2", name, "a DTensor" if found else "a mesh with tensor=", why, do)
    there = None if mesh.tensor is None else mesh.tensor.within
    why = "plans are of the other ranks, and norms over both"
    for name, parameter in found.items():
        got = f"a DTensor on {parameter.device_mesh}, the mesh has tensor={there}"
        require(there is not None and parameter.device_mesh == there, name, got, why, f"pass {TYPED}")
    buffers = [name for name, buffer in model.named_buffers() if isinstance(buffer, DTensor)]
    why, do = "a step gives all ranks rank 0's", "keep it an ordinary tensor"
    require(not buffers, buffers[0] if buffers else "", "a buffer that is a DTensor", why, do)
    away = [name for name, p in model.named_parameters() if p.is_meta]
    why, do = "tensor parallelism from the meta device is not tested here", "give it values before parallelize_module"
    require(not away, away[0] if away else "", "a DTensor without values", why, do)
    for what, given in (("dtype", dtype), ("offload", offload)):
        why, do = "it would change DTensors of tensor parallelism, which is not tested here", "leave it out"
        require(given is None, what, f"{given}, with tensor parallelism", why, do)


def check_cut(plan: Plan, mesh: Mesh) -> None:
    """Refuse plans under which ``fully_shard`` would cut over ranks that are no dimension of the user's mesh."""
    if mesh.tensor is None:
        return
    inside = mesh.inside(shard_level(plan, mesh.tiers))
    got = f"{plan}, which cuts over {inside} of {mesh.world} ranks"
    why = "torch joins a dimension of the mesh with that of tensor parallelism, and those ranks are none"
    require(inside == mesh.world, "plan", got, why, "pass make_mesh(…, groups=1), and a plan with I or G")
