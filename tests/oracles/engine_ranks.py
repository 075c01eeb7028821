"""What a rank of the engine is asked in tests: bytes sent and held, moves between plans, freezing, failures."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from oracles import sharded
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.gradients import Gradients
from sparing.sharding.engine.weights import spread
from sparing.sharding.planner.prediction import live_bytes, transient_bytes
from sparing.sharding.planner.traffic import Traffic
from sparing.sharding.planner.workload import BucketSpec, Workload

PLANS = [plan.name for plan in sh.effective()]


Question = tuple[Callable[..., Any], tuple[Any, ...]]


def asked(sizes: tuple[int, int], questions: Mapping[str, Question]) -> dict[str, Any]:
    """Answers of one rank: each question is a function of the mesh and more."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        return {name: question(mesh, *more) for name, (question, more) in questions.items()}


# ---- a net, and parts of it frozen


class Deep(sharded.Net):
    """Three equal blocks between two roots."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, depth=3)


FROZEN: dict[str, Callable[[str], bool]] = {
    "all": lambda name: False,
    "some": lambda name: name.startswith("blocks.0.") or name in ("blocks.1.first.weight", "embed.bias"),
    "one": lambda name: not name.startswith("blocks.1.second."),
}
"""What does not train, by name of parameter."""


def deep(case: Case, frozen: str = "all", dtype: torch.dtype = torch.float64) -> Deep:
    generator = torch.Generator().manual_seed(5)
    net = Deep(case)
    for name, p in net.named_parameters():
        p.data = (torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2).to(dtype)
        p.requires_grad_(not FROZEN[frozen](name))
    net.shift.data = net.shift.data.to(dtype)
    return net


def specs(engine: Any) -> list[BucketSpec]:
    """The buckets as the formulas want them; roots before the body are at place -1, those after it at its length."""
    names = [stage.name for stage in engine.flow.stages]
    found = []
    for bucket in engine.buckets:
        place = names.index(bucket.block) if bucket.block in names else -1 if bucket.block == "embed" else len(names)
        elements, root = sum(p.numel() for p in bucket.params), place not in range(len(names))
        found.append(BucketSpec(elements=elements, trainable=bucket.trainable, root=root, block=place))
    return found


def one_step(engine: Any, case: Case, step: int, dtype: torch.dtype = torch.float64) -> float:
    for micro in range(case.accumulate):
        x = sharded.rows(case, step, micro, engine.mesh.rank).to(dtype)
        engine.backward(sharded.loss_of(engine.model, x, case))
    return engine.step()


# ---- bytes on the wires


def counted(engine: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    engine.flush()
    engine.mesh.drain()
    names = [axis.name for axis in engine.mesh.axes]
    counter = engine.mesh.counter
    return tuple(counter.sent[n] for n in names), tuple(counter.messages[n] for n in names)


def between(before: Any, after: Any) -> list[tuple[int, ...]]:
    return [tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in zip(before, after, strict=True)]


def traffic(mesh: Any, plan: str, frozen: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes and messages of one step per axis, counted and by the formulas."""
    case = Case(plan=plan, accumulate=2, exact=False, checkpointing=options.get("checkpointing", False))
    dtype, wire = options.get("dtype", torch.float64), options.get("reduce_dtype")
    net = deep(case, frozen, torch.float64 if dtype is torch.float64 else torch.float32)
    engine = sh.shard_(
        net, plan, mesh, optimizer=partial(torch.optim.SGD, lr=0.01), accumulate=2, dtype=dtype, reduce_dtype=wire,
        prefetch=options.get("prefetch", 1),
    )  # fmt: skip
    net.shift.data = net.shift.data.to(dtype)
    one_step(engine, case, 0, dtype)
    before = counted(engine)
    one_step(engine, case, 1, dtype)
    found = between(before, counted(engine))
    expected = Traffic.of_step(
        plan, mesh.sizes, specs(engine), accumulate=2, gather_bytes=dtype.itemsize,
        reduce_bytes=(wire or (torch.float32 if dtype.itemsize < 4 else dtype)).itemsize, slow=mesh.wires.slow,
    )  # fmt: skip
    engine.close()
    return {"found": found, "expected": [expected.total, expected.messages]}


# ---- bytes in memory


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Address -> bytes of everything that the tensors keep alive."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def held(engine: Any) -> dict[str, int]:
    """Bytes that are really allocated, by purpose."""
    stores = storages([b.store for b in engine.buckets])
    acc = storages([g.acc for g in engine.flow.gradients.values() if g.acc is not None])
    segments = [p for group in engine.optimizer.param_groups for p in group["params"]]
    masters = {at: size for at, size in storages([p.data for p in segments]).items() if at not in stores}
    states = [x for p in segments for x in engine.optimizer.state[p].values() if isinstance(x, Tensor) and x.ndim]
    owed = storages([residual.value for residual in engine.residuals.values()])
    published = storages(list(engine.masters._published.values()))
    anchors = storages([*engine.outer.anchors.values(), *engine.outer.momenta.values()] if engine.outer else [])
    kinds = {
        "params": stores, "grads": acc, "master": masters, "moments": storages(states), "residuals": owed,
        "published": published, "anchors": anchors,
    }  # fmt: skip
    return {kind: sum(sizes.values()) for kind, sizes in kinds.items()}


def everything() -> dict[int, int]:
    """Address -> bytes of every floating tensor that was made since ``gc.freeze``."""
    gc.collect()
    return storages([x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.is_floating_point()])


class Peaks:
    """The most that was whole at once, seen wherever something begins to be."""

    def __init__(self) -> None:
        self.whole = self.grads = self.blocks = 0
        self.buffers: list[tuple[StorageWeakRef, int]] = []
        self.buckets: Sequence[Bucket] = ()

    def look(self) -> None:
        full = [b for b in self.buckets if b.store is not b.full and b.full.untyped_storage().nbytes()]
        self.whole = max(self.whole, sum(b.full.untyped_storage().nbytes() for b in full))
        self.blocks = max(self.blocks, len({b.block for b in full if not b.root}))
        self.buffers = [(ref, size) for ref, size in self.buffers if not ref.expired()]
        self.grads = max(self.grads, sum(size for _, size in self.buffers))


@contextmanager
def watched(peaks: Peaks) -> Iterator[None]:
    """Look whenever a bucket is gathered or a gradient buffer made."""
    gather, empty = Bucket.unshard_, Gradients._empty

    def gather_(self: Bucket) -> None:
        gather(self)
        peaks.look()

    def made(self: Gradients, length: int, dtype: torch.dtype) -> Tensor:
        tensor = empty(self, length, dtype)
        if not self.whole and length == self.bucket.layout.padded:
            peaks.buffers.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        peaks.look()
        return tensor

    Bucket.unshard_, Gradients._empty = gather_, made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bucket.unshard_, Gradients._empty = gather, empty  # type: ignore[method-assign]


@contextmanager
def lingering() -> Iterator[list[Any]]:
    """Hold what is gathered, as gloo's thread does, which lets go some time after it has told of the end."""
    gather = dist.all_gather
    kept: list[Any] = []

    def held(*args: Any, **options: Any) -> Any:
        kept.append(args)
        return gather(*args, **options)

    dist.all_gather = held
    try:
        yield kept
    finally:
        dist.all_gather = gather


def memory(
    mesh: Any, plan: str, frozen: str, dtype: torch.dtype, prefetch: int, local: sh.LocalSteps | None = None
) -> dict[str, Any]:
    """Bytes held before the optimizer runs, at rest, and at the peak, and what the formulas say."""
    case = Case(plan=plan, accumulate=2, exact=False)
    gc.freeze()
    net = deep(case, frozen, torch.float64 if dtype is torch.float64 else torch.float32)
    engine = sh.shard_(
        net, plan, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-3), accumulate=2, dtype=dtype, prefetch=prefetch,
        local=local,
    )  # fmt: skip
    net.shift.data = net.shift.data.to(dtype)
    peaks = Peaks()
    peaks.buckets = engine.buckets
    with watched(peaks), lingering() as kept:
        one_step(engine, case, 0, dtype)
        for micro in range(2):
            engine.backward(sharded.loss_of(net, sharded.rows(case, 1, micro, mesh.rank).to(dtype), case))
        loaded = held(engine)
        engine.step()
    assert kept or engine.mesh.world == 1
    engine.flush()
    engine.mesh.drain()
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    live = live_bytes(
        specs(engine), mesh.sizes, plan, param_bytes=dtype.itemsize, grad_bytes=wide.itemsize,
        master_bytes=wide.itemsize, views=wide == dtype, slow=mesh.wires.slow, local=local,
    )  # fmt: skip
    work = {"prefetch": prefetch, "param_bytes": dtype.itemsize, "wire_bytes": wide.itemsize}
    found = {
        "loaded": loaded,
        "live": dataclasses.asdict(live),
        "rest": sum(everything().values()),  # while ``kept`` holds what gloo's thread may hold still
        "rest expected": live.total - live.grads + _small(engine, dtype),
        "peak": peaks.whole + peaks.grads,
        "peak expected": transient_bytes(Workload.of(specs(engine), **work), mesh.sizes, plan),
        "blocks": peaks.blocks,
        "grads": peaks.grads,
    }
    engine.close()
    return found


def _small(engine: Any, dtype: torch.dtype) -> int:
    """Holes of freed parameters, the buffer of the net, and counts of steps in the optimizer."""
    holes = sum(len(bucket.params) for bucket in engine.buckets) * dtype.itemsize
    states = [x for state in engine.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return holes + engine.model.shift.untyped_storage().nbytes() + sum(x.nbytes for x in states if not x.ndim)


# ---- moves between plans


class Adder(nn.Module):
    """Adds a linear image of the first three columns to the others: its gradient knows no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(3, 5)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([h[:, :3], h[:, 3:] + self.image(h[:, :3])], 1)


class Sum(nn.Module):
    """Twenty steps of it, with momentum one half, are exact in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Adder() for _ in range(3))
        for p in self.parameters():
            p.data = torch.arange(p.numel(), dtype=torch.float64).sub(7).view(p.shape)
        self.embed.requires_grad_(False)
        self.embed.weight.data[:3], self.embed.bias.data[:3] = torch.eye(3), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h


HALF = partial(torch.optim.SGD, lr=0.5, momentum=0.5)


def momenta(engine: Any, key: str) -> dict[str, Tensor]:
    """A state of the optimizer, whole, by parameter."""
    found = {}
    for bucket in engine.buckets:
        if bucket in engine.masters:
            flat = spread(bucket, engine.masters.state(bucket)[key], engine.levels(bucket)[2], 0)
            found |= {name: value.clone() for name, value in bucket.unflatten(flat)}
    return found


def chained(mesh: Any, plans: Sequence[Any]) -> dict[str, Any]:
    """One step under each plan, against one process that knows of none."""
    case, own, net = Case(accumulate=2), Sum(), Sum()
    optimizer = HALF([p for p in own.parameters() if p.requires_grad])
    engine = sh.shard_(net, "NNN", mesh, optimizer=HALF, accumulate=2)
    for step, plan in enumerate(plans):
        for micro in range(2):
            for rank in range(mesh.world):
                own(sharded.rows(case, step, micro, rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.set_plan(plan)
        for micro in range(2):
            engine.backward(net(sharded.rows(case, step, micro, mesh.rank)).sum())
        engine.step(divisor=1.0)
    weights, moments = engine.full_state_dict(), momenta(engine, "momentum_buffer")
    engine.close()
    expected = {n: optimizer.state[p]["momentum_buffer"] for n, p in own.named_parameters() if p in optimizer.state}
    return {
        "weights": all(torch.equal(weights[name], value) for name, value in own.state_dict().items()),
        "momenta": moments.keys() == expected.keys() and all(torch.equal(moments[n], v) for n, v in expected.items()),
        "moved": not torch.equal(weights["blocks.0.image.weight"], Sum().blocks[0].image.weight),
        "exact": max(v.abs().max().item() for v in weights.values()) * 2.0 ** (len(plans) + 2) < 2**53,
    }


def curved(mesh: Any, plans: Sequence[str]) -> float:
    """The same on the curved net with clipping: the largest relative distance to one process."""
    case = Case(exact=False, optimizer="adamw", steps=len(plans), clip=0.5, groups=True, frozen=True)
    expected, _ = sharded.one_process(case, mesh.world)
    net = sharded.made(case)
    engine = sh.shard_(
        net, plans[-1], mesh, optimizer=sharded.factory(case), groups=sharded.groups_for(net, case), clip=case.clip
    )
    for step, plan in enumerate(plans):
        engine.set_plan(plan if step % 2 else {"blocks.0": plan, "embed": plan})
        sharded.steps_(engine, case, range(step, step + 1))
    found = engine.full_state_dict()
    engine.close()
    return max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in expected.items())
