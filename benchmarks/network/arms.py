"""Every contender as one value: ``build`` makes what trains on this rank, whose ``step`` is one optimizer step.

Rivals are set up the way their own documentation says for accumulation, each with the settings found best here. All
arms of a cell start from the same weights and see the same data, so their losses agree; ``workers`` checks that.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.cells import Cell
from benchmarks.network.problem import LEARNING_RATE, Data, model
from sparing.sharding.network.lanes import yielding

if TYPE_CHECKING:
    from sparing.sharding import Mesh

ZERO = (1, 2, 3)
PLANS = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG")


FSDP2 = " on fsdp2"
"""Behind a plan: our collectives inside PyTorch's engine."""


class Running(Protocol):
    """One contender on one rank."""

    def step(self) -> float:
        """Accumulate, reduce, update; the mean loss of this rank's micro-batches."""
        ...

    def close(self) -> None:
        """Let go of threads and groups."""
        ...


@dataclass(kw_only=True)
class Seat:
    """Where an arm is built: this rank's place, and what its collectives may be throttled to."""

    cell: Cell
    rank: int
    throttled: bool = False
    """Rates are held inside our rings, since the links are not shaped."""

    data: Data = field(init=False)
    meshes: dict[str, Mesh] = field(default_factory=dict, init=False)
    """Our meshes, by how they gather."""

    def __post_init__(self) -> None:
        """Draw the data once for all arms."""
        self.data = Data(self.cell, self.rank)

    def close(self) -> None:
        """End the lanes of the meshes."""
        for mesh in self.meshes.values():
            mesh.close()


Build = Callable[[Seat], Running]


@dataclass(kw_only=True)
class Plain:
    """A wrapped module with an ordinary optimizer: DDP and FSDP2."""

    net: nn.Module
    data: Data
    micros: int
    before: Callable[[int], contextlib.AbstractContextManager[None]] = lambda micro: contextlib.nullcontext()
    """What surrounds forward and backward of a micro-step."""

    lane: object = None
    """Thread of our rings, where the arm has one."""

    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        """Make the optimizer when the parameters are what the wrapper made of them."""
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)

    def step(self) -> float:
        """One step."""
        total = 0.0
        for micro in range(self.micros):
            with self.before(micro):
                loss = self.data.loss(self.net, micro)
                (loss / self.micros).backward()
            total += loss.item() / self.micros
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def close(self) -> None:
        """Nothing is held but the lane."""
        if self.lane is not None:
            self.lane.close()  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class Alone(Plain):
    """The arithmetic alone, on all ranks at once: what every arm computes, without any message."""

    parts: dict[str, float] = field(default_factory=dict, init=False)
    """Seconds of forward and backward of a micro-step and of the update, in the latest step."""

    def step(self) -> float:
        """One step with a clock between its parts."""
        total, spent, clock = 0.0, [0.0, 0.0], time.perf_counter
        for micro in range(self.micros):
            start = clock()
            loss = self.data.loss(self.net, micro)
            middle = clock()
            (loss / self.micros).backward()
            spent = [spent[0] + middle - start, spent[1] + clock() - middle]
            total += loss.item() / self.micros
        start = clock()
        self.optimizer.step()
        self.optimizer.zero_grad()
        forward, backward = (seconds / self.micros for seconds in spent)
        self.parts = {"forward": forward, "backward": backward, "update": clock() - start}
        return total


def alone(seat: Seat) -> Running:
    """No collectives."""
    return Alone(net=model(seat.cell), data=seat.data, micros=seat.cell.accumulate)


def ddp(seat: Seat, *, bucket_mb: float = 25, yields: bool = False) -> Running:
    """DistributedDataParallel, ``no_sync`` until the last micro-step; gloo's threads as they come, or as ours are."""
    with yielding() if yields else contextlib.nullcontext():
        group = dist.new_group() if yields else None
    net = DistributedDataParallel(
        model(seat.cell), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, process_group=group
    )
    last = seat.cell.accumulate - 1
    return Plain(
        net=net, data=seat.data, micros=seat.cell.accumulate,
        before=lambda micro: net.no_sync() if micro < last else contextlib.nullcontext(),
    )  # fmt: skip


def fsdp2(seat: Seat, *, hybrid: bool, sync: str, overlap: bool, rings: bool = False) -> Running:
    """FSDP2, a group per block.

    Args:
        seat: Where.
        hybrid: Shard inside the group and replicate across (its HSDP), or shard over all ranks.
        sync: Of micro-steps before the last: ``"reduce"`` reduces (ZeRO-3), ``"scatter"`` reduces inside the group only
            (hybrid: ``set_requires_all_reduce``), ``"none"`` keeps whole gradients (``set_requires_gradient_sync``).
        overlap: Asynchronous all-gathers with prefetch of the next block, which on the CPU are off by default.
        rings: Our rings in place of gloo's all-gather and reduce-scatter.

    Returns:
        The arm.
    """
    cell = seat.cell
    sizes, names = ((cell.groups, cell.per_group), ("inter", "intra")) if hybrid else ((cell.world,), ("world",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    net = model(cell)
    blocks = [fully_shard(block, mesh=mesh) for block in net]
    root = fully_shard(net, mesh=mesh)
    if overlap:
        root._set_unshard_async_op(True)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    lane = None
    if rings:
        from benchmarks.network.fsdp_rings import give_rings

        lane = give_rings(blocks, mesh["intra"] if hybrid else mesh)
    last = cell.accumulate - 1

    @contextlib.contextmanager
    def before(micro: int) -> Iterator[None]:
        toggle(root, sync, micro == last)
        yield

    return Plain(net=net, data=seat.data, micros=cell.accumulate, before=before, lane=lane)


def toggle(root: FSDPModule, sync: str, last: bool) -> None:
    """Say whether this micro-step reduces."""
    root.set_is_last_backward(last)
    if sync == "none":
        root.set_requires_gradient_sync(last)
    elif sync == "scatter":
        root.set_requires_all_reduce(last)


def zero(seat: Seat, *, stage: int, lean: bool) -> Running:
    """DeepSpeed, from the interpreter that has it."""
    from benchmarks.peers.deepspeed_run import prepare

    return prepare(seat, stage, lean=lean)


def ours(seat: Seat, *, plan: str, gather: str, engine: str = "sparing") -> Running:
    """The library, by a plan, on its own engine or on ``fully_shard``."""
    from benchmarks.network.engine_arm import prepare

    return prepare(seat, plan, gather=gather, engine=engine)


def _fsdp2(*, hybrid: bool, sync: str, overlap: bool, rings: bool = False) -> Build:
    """An FSDP2 arm as a builder."""
    return lambda seat: fsdp2(seat, hybrid=hybrid, sync=sync, overlap=overlap, rings=rings)


def _zero(stage: int, *, lean: bool = False) -> Build:
    """A DeepSpeed arm as a builder."""
    return lambda seat: zero(seat, stage=stage, lean=lean)


def _ours(plan: str, gather: str = "two-level", engine: str = "sparing") -> Build:
    """An arm of ours as a builder."""
    return lambda seat: ours(seat, plan=plan, gather=gather, engine=engine)


WAYS = {"int8": 1, "int4": 1, "every 8": 8, "every 32 int8": 32}
"""Fewer bits or fewer meetings between groups, behind a plan -> steps after which all groups have met."""

ARMS: dict[str, Build] = {
    "alone": alone,
    "ddp": ddp,
    "ddp 4MB": lambda seat: ddp(seat, bucket_mb=4),
    "ddp yielding": lambda seat: ddp(seat, yields=True),
    "fsdp2": _fsdp2(hybrid=False, sync="reduce", overlap=False),
    "fsdp2 async": _fsdp2(hybrid=False, sync="reduce", overlap=True),
    "fsdp2 no-sync": _fsdp2(hybrid=False, sync="none", overlap=True),
    "fsdp2 hybrid": _fsdp2(hybrid=True, sync="scatter", overlap=False),
    "fsdp2 hybrid async": _fsdp2(hybrid=True, sync="scatter", overlap=True),
    "fsdp2 hybrid no-sync": _fsdp2(hybrid=True, sync="none", overlap=True),
    "fsdp2 rings": _fsdp2(hybrid=False, sync="reduce", overlap=True, rings=True),
    "fsdp2 hybrid rings": _fsdp2(hybrid=True, sync="scatter", overlap=True, rings=True),
    **{f"zero-{stage}": _zero(stage) for stage in ZERO},
    "zero-3 lean": _zero(3, lean=True),
    **{plan: _ours(plan) for plan in PLANS},
    **{plan + FSDP2: _ours(plan, engine="fsdp2") for plan in PLANS},
    **{
        f"{plan} {gather}": _ours(plan, gather)
        for plan in PLANS
        for gather in ("flat", "overlapped", "gloo", "hurried", *WAYS)
    },
}
"""Every contender by its name in the records."""

SYSTEMS = {
    "ddp": "NNN",
    "ddp 4MB": "NNN",
    "ddp yielding": "NNN",
    "fsdp2": "GGG",
    "fsdp2 async": "GGG",
    "fsdp2 rings": "GGG",
    "fsdp2 no-sync": "GNG",
    "fsdp2 hybrid": "III",
    "fsdp2 hybrid async": "III",
    "fsdp2 hybrid rings": "III",
    "fsdp2 hybrid no-sync": "INI",
    "zero-1": "NNG",
    "zero-2": "NGG",
    "zero-3": "GGG",
    "zero-3 lean": "GGG",
}
"""Plan that a rival follows."""

RIVALS = tuple(SYSTEMS)
