"""What ranks find about the engine on ``fully_shard`` beyond plain plans: offload, lanes without threads, refusals."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from oracles import sharded
from oracles.fsdp_programs import CURVED, different, engine_of
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.network import mesh as mesh_room
from sparing.sharding.network import wires as wires_room
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.streams import StreamLane
from sparing.sharding.network.wires import HostCollectives, RingCollectives

PLANS = ["NNN", "NIG", "ING", "III", "IGG", "GIG", "GGG"]
"""Every way in which sums wait, travel and are cut."""

ALL_OF_IT = Case(
    exact=False, optimizer="adamw", clip=0.05, accumulate=3, frozen=True, tied=True, uneven=True, groups=True, steps=2
)


def told(act: Callable[[], Any]) -> str:
    """The line of a refusal."""
    try:
        act()
    except UserError as error:
        return str(error)
    return "went through"


def again(model: Any, mesh: Mesh, engine: Any = None) -> str:
    return told(lambda: sh.shard_(model, "IIG", mesh, optimizer=torch.optim.AdamW, engine=engine))


def bits(case: Case, mesh: Mesh, **settings: Any) -> dict[str, torch.Tensor]:
    engine, norms = sharded.trained(case, mesh, engine="fsdp2", **settings)
    found: dict[str, torch.Tensor] = engine.full_state_dict()
    for name, state in engine.state_dict()["optimizer"]["state"].items():
        found |= {f"{name} {key}": value.to_local() for key, value in state.items() if hasattr(value, "to_local")}
    engine.close()
    return found | {"norms": torch.tensor(norms)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def offloaded(plan: str, mesh: Mesh) -> bool:
    """Whether everything has the bits of the same training on the device, 16-bit weights with masters too."""
    cases = (dataclasses.replace(ALL_OF_IT, plan=plan), Case(plan=plan, dtype=torch.bfloat16, accumulate=2))
    return all(same(bits(case, mesh, offload="cpu"), bits(case, mesh)) for case in cases)


def offloaded_from_nothing(mesh: Mesh) -> float:
    """A model on the meta device, whose weights come later."""
    engine = engine_of(different(), "IIG", mesh, offload="cpu")
    engine.load_full_state_dict_(sharded.made(CURVED).state_dict())
    sharded.steps_(engine, CURVED, range(CURVED.steps))
    expected, _ = sharded.one_process(CURVED, mesh.world)
    return max(float(((v - expected[n]).abs() / (expected[n].abs() + 1e-3)).max())
        for n, v in engine.full_state_dict().items())  # fmt: skip


def as_on_cuda(plan: str, expected: dict[str, torch.Tensor], gather: Any) -> bool:
    """The lanes and the way by main memory that tensors on CUDA have over gloo; here without the device."""

    def staged(*given: Any) -> HostCollectives:
        found = rings(*given)
        assert isinstance(found, RingCollectives)
        return HostCollectives(found)

    rings = wires_room.collectives_of
    with (
        mock.patch.object(mesh_room, "Lane", StreamLane),
        mock.patch.object(mesh_room, "collectives_of", staged),
        sh.make_mesh(per_group=2, groups=2, wires=sh.Wires(gather=gather)) as mesh,
    ):
        return same(bits(dataclasses.replace(ALL_OF_IT, plan=plan), mesh), expected)


def twice(mesh: Mesh) -> dict[str, str]:
    """A model, a part of it or one around it, whose weights happen to be whole, handed to an engine again."""
    found = {}
    for second in ("sparing", "fsdp2"):
        for plan in ("NIG", "IIG"):
            first = engine_of(sharded.made(CURVED), plan, mesh)
            first.model(sharded.rows(CURVED, 0, 0, mesh.rank))
            parts = {
                "same": first.model, "last block": first.model.blocks[-1], "inside": first.model.head,
                "around": nn.Sequential(first.model, nn.Linear(3, 3).double()),
            }  # fmt: skip
            for where, model in parts.items():
                found[f"{where}, {plan}, {second}"] = again(model, mesh, second)
            first.close()
            found[f"closed, {plan}, {second}"] = again(first.model, mesh, second)
    theirs = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), reshard_after_forward=False)
    theirs(torch.ones(2, 4))
    found["torch's own"] = again(theirs, mesh)
    ours = sh.shard_(sharded.made(CURVED), "NIG", mesh, optimizer=torch.optim.AdamW, engine="sparing")
    found["a part of ours"] = again(ours.model.blocks[1], mesh)
    ours.close()
    sh.shard_(ours.model, "NIG", mesh, optimizer=torch.optim.AdamW).close()
    return found


def other_parallelism(mesh: Mesh) -> dict[str, str]:
    """Tensor parallelism inside groups, and a pipeline whose stages are on other ranks."""
    found = {}
    for engine in ("sparing", "fsdp2"):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        parallelize_module(net, both["tp"], {"1": ColwiseParallel()})
        found[f"tensors, {engine}"] = again(net, mesh, engine)
        torch.manual_seed(0)
        layers = {f"{4 * (mesh.rank // 2) + at}": nn.Linear(4, 4) for at in range(4)}
        stage = nn.Sequential(OrderedDict(layers))
        found[f"pipeline, {engine}"] = again(stage, mesh, engine)
    return found


def other_clip(mesh: Mesh) -> str:
    """A limit that one rank has changed alone."""
    engine = engine_of(sharded.made(CURVED), "NIG", mesh, clip=1.0)
    engine.backward(engine.model(sharded.rows(CURVED, 0, 0, mesh.rank)).sum())
    engine.settings = dataclasses.replace(engine.settings, clip=0.5 if mesh.rank == 1 else 1.0)
    return told(engine.step)


def everything() -> dict[str, Any]:
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        plain = {plan: bits(dataclasses.replace(ALL_OF_IT, plan=plan), mesh) for plan in ("NIG", "IIG", "GIG", "NNN")}
        found: dict[str, Any] = {f"offloaded {plan}": offloaded(plan, mesh) for plan in PLANS}
        found |= {"offloaded meta": offloaded_from_nothing(mesh), "twice": twice(mesh), "clip": other_clip(mesh)}
        found["parallel"] = other_parallelism(mesh)
    for plan, expected in plain.items():
        found[f"as on CUDA {plan}"] = as_on_cuda(plan, expected, "two-level")
    return found
