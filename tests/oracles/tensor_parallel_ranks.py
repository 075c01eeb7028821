"""Two ranks of tensor parallelism times two of data, as torch composes them; and the whole model in one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from oracles.idiom_ranks import relative
from oracles.pipeline_ranks import clipped, loss_of, refusal
from sparing import sharding as sh
from sparing.sharding import checkpoint
from sparing.sharding.network.mesh import Mesh

WIDTH, HIDDEN, STEPS, CLIP = 4, 6, 3, 0.05
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
PLANS = ("NNI", "NIG", "III", "IIG", "GGG")
CLIPS = {"largest entry": sh.Clip(0.01, norm_type=math.inf), "each": sh.Clip(0.02, norm_type=1, each=True)}
WAYS = ("tensor", "sequence")
"""Some weights cut and the others ordinary tensors; or all DTensors, where norms see a part of each row."""


class Layer(nn.Module):
    """Three rows of hidden units on each rank, so that two cut them unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.second(self.first(self.norm(h)).tanh())
        return out


class Net(nn.Module):
    """Layers between two roots."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head(h)
        return out


def whole(seed: int = 3) -> Net:
    """The same weights in every process."""
    made, generator = Net().double(), torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return made


def parallel(way: str, mesh: DeviceMesh, seed: int = 3) -> Net:
    """The same, behind torch's ``parallelize_module``."""
    made = whole(seed)
    styles: dict[str, Any] = {"layers.*.first": ColwiseParallel(), "layers.*.second": RowwiseParallel()}
    if way == "sequence":
        styles = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(use_local_output=True),
            "layers.*.first": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.second": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(made, mesh, styles)
    return made


def rows(step: int, turn: int, place: int) -> tuple[Tensor, Tensor]:
    """Of the ranks at a place of the data dimension."""
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + place)
    x, y = torch.randn(2, 3, 2, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def alone(accumulate: int, clip: float | sh.Clip = CLIP) -> dict[str, Tensor]:
    """One process with the rows of all."""
    model, norms = whole(), []
    optimizer = OPTIMIZER(model.parameters())
    for step in range(STEPS):
        every = [rows(step, turn, place) for turn in range(accumulate) for place in range(2)]
        torch.stack([loss_of(model(x), y) for x, y in every]).mean().backward()  # type: ignore[no-untyped-call]
        norms.append(clipped(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "norms": torch.tensor(norms, dtype=torch.float64)}


@contextlib.contextmanager
def meshes() -> Iterator[tuple[DeviceMesh, Mesh]]:
    """Of torch, and ours of the data dimension."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sh.make_mesh(within=both["dp"], tensor=both["tp"], groups=1) as mesh:
        yield both, mesh


def started(model: Net, plan: str, mesh: Mesh, **more: Any) -> Any:
    settings: dict[str, Any] = {"optimizer": OPTIMIZER, "clip": CLIP, "engine": "fsdp2"} | more
    return sh.shard_(model, plan, mesh, **settings)


def step_(engine: Any, step: int) -> float:
    for turn in range(engine.settings.accumulate):
        x, y = rows(step, turn, engine.mesh.rank)
        engine.backward(loss_of(engine.model(x), y))
    return float(engine.step())


def apart(engine: Any, norms: list[float], expected: dict[str, Tensor]) -> float:
    """Largest difference of whole weights, and of the norms."""
    far = [relative(value, expected[name]) for name, value in engine.full_state_dict().items()]
    return max(*far, relative(torch.tensor(norms, dtype=torch.float64), expected["norms"]))


def trained(
    plan: str, way: str, both: DeviceMesh, mesh: Mesh, accumulate: int = 1, clip: float | sh.Clip = CLIP
) -> float:
    """Difference to one process."""
    engine = started(parallel(way, both["tp"]), plan, mesh, accumulate=accumulate, clip=clip)
    norms = [step_(engine, step) for step in range(STEPS)]
    engine.check()
    far = apart(engine, norms, alone(accumulate, clip))
    engine.close()
    return far


def resumed(plan: str, way: str, both: DeviceMesh, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Differences after steps, a checkpoint, and a step of an engine whose every value was wrong."""
    found: dict[str, Any] = {}
    engine = started(parallel(way, both["tp"]), plan, mesh)
    norms = [step_(engine, step) for step in range(STEPS - 1)]
    dcp.save(engine.state_dict(), checkpoint_id=folder / way)
    other = started(parallel(way, both["tp"], seed=4), plan, mesh)
    dcp.load(state := other.state_dict(), checkpoint_id=folder / way)
    other.load_state_dict_(state)
    found[f"dcp {plan} {way}"] = apart(other, [*norms, step_(other, STEPS - 1)], alone(1))
    weights, other = engine.full_state_dict(), started(parallel(way, both["tp"], seed=4), plan, mesh)
    other.load_full_state_dict_(weights)
    with other.gathered() as model, torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    found[f"weights {plan} {way}"] = max(
        relative(value, 2 * weights[name]) for name, value in other.full_state_dict().items()
    )
    return found


def refused(both: DeviceMesh, mesh: Mesh, folder: Path) -> dict[str, str]:
    """By what is done."""
    found: dict[str, str] = {}

    def said(plan: str = "GGG", on: Mesh = mesh, **more: Any) -> str:
        return refusal(lambda: started(parallel("tensor", both["tp"]), plan, on, **more))

    found["whole rows"] = said("NNN")
    found["our own engine"] = said(engine="sparing")
    found["another type"] = said(dtype=torch.float32)
    found["main memory"] = said(offload="cpu")
    with sh.make_mesh(within=both["dp"], groups=1) as plain:
        found["a mesh without tensor="] = said(on=plain)
    with sh.make_mesh(within=both["dp"], tensor=both["tp"], groups=2) as grouped:
        found["two groups"] = said("IIG", on=grouped)
    engine = started(parallel("tensor", both["tp"]), "GGG", mesh)
    found["our own checkpoint"] = refusal(lambda: checkpoint.save(engine, folder / "own"))
    with torch.no_grad():
        # an ordinary tensor, which each rank of tensor parallelism has for itself
        engine.model.layers[0].norm.weight.to_local().add_(both["tp"].get_local_rank())
    found["norms that went apart"] = refusal(engine.check)
    return found


def everything(folder: Path) -> dict[str, Any]:
    """All cells on four ranks."""
    found: dict[str, Any] = {}
    with meshes() as (both, mesh):
        for way in WAYS:
            for plan in PLANS:
                found[f"{plan} {way}"] = trained(plan, way, both, mesh, 1 + (plan in {"NIG", "III"}))
            for name, clip in CLIPS.items():
                found[f"{name} {way}"] = trained("GGG", way, both, mesh, clip=clip)
        found |= resumed("IIG", "tensor", both, mesh, folder) | resumed("NIG", "sequence", both, mesh, folder)
        found |= refused(both, mesh, folder)
    return found
