"""The library as an arm: any plan, on a mesh that all plans of a cell share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch

from benchmarks.network.arms import WAYS, Running, Seat
from benchmarks.network.problem import LEARNING_RATE, Data, model
from sparing import sharding as sh
from sparing.sharding.engine.engine import Engine
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.network import lanes as lanes_room
from sparing.sharding.network import mesh as mesh_room
from sparing.sharding.network.rings import RateLimit
from sparing.sharding.network.wires import Wires

SLOW = {"int8": sh.LowBit(bits=8), "int4": sh.LowBit(bits=4)}
LOCAL = {"every 8": sh.LocalSteps(every=8), "every 32 int8": sh.LocalSteps(every=32, wire=SLOW["int8"])}


class Ours:
    """An engine; what is in flight after a step is finished by ``flush``."""

    def __init__(self, engine: Engine | FsdpEngine, data: Data, period: int = 1) -> None:
        self.engine, self.data, self.lazy, self.period = engine, data, False, period
        # on fully_shard a step ends with its parameters
        if isinstance(engine, Engine):
            levels = [engine.levels(bucket) for bucket in engine.buckets if bucket.trainable]
            self.lazy = any(params != state for params, _, state in levels)

    def step(self) -> float:
        """One step."""
        micros = self.engine.settings.accumulate
        total = 0.0
        for micro in range(micros):
            loss = self.data.loss(self.engine.model, micro)
            self.engine.backward(loss)
            total += loss.item() / micros
        self.engine.step()
        return total

    def flush(self) -> None:
        """Wait for the parameters of the next step."""
        self.engine.mesh.drain()
        if isinstance(self.engine, Engine):
            self.engine.flush()

    def sent(self) -> dict[str, int]:
        """Payload bytes that the rings of this rank have sent, by axis."""
        return dict(self.engine.mesh.counter.sent)

    def close(self) -> None:
        """The mesh is the cell's, and closed with it."""
        self.flush()


def mesh(seat: Seat, gather: str = "two-level") -> sh.Mesh:
    """The cell's mesh for one way of gathering, made once; local steps have that of ordinary ones."""
    gather = "two-level" if gather in LOCAL else gather
    if gather not in seat.meshes:
        make = partial(sh.make_mesh, groups=seat.cell.groups, per_group=seat.cell.per_group)
        seat.meshes[gather] = hurried(make) if gather == "hurried" else make(wires=wires(seat, gather))
    return seat.meshes[gather]


def wires(seat: Seat, gather: str) -> Wires:
    """How collectives run."""
    if gather == "gloo":
        return Wires(kind="builtin", gather="flat")  # its collectives over the world count no bytes and hold none back
    cell, rate = seat.cell, {}
    if seat.throttled:
        for axis, bits in (("intra", cell.intra), ("inter", cell.inter)):
            rate[axis] = RateLimit(rate=bits / 8, sharing=cell.per_group)
    slow = SLOW.get(gather)
    return Wires(gather="two-level" if slow else gather, rate=rate, slow=slow)  # type: ignore[arg-type]


def hurried(make: Callable[[], sh.Mesh]) -> sh.Mesh:
    """A mesh whose threads push others off their cores when they wake, as threads do."""
    with mock.patch.object(mesh_room, "yielding", nullcontext), mock.patch.object(lanes_room, "yielding", nullcontext):
        made = make()
        for lane in made.lanes:
            lane.submit(lambda: None).wait()  # its thread begins with the first work
    return made


def prepare(seat: Seat, plan: str, *, gather: str = "two-level", engine: str = "sparing") -> Running:
    """One plan on this rank."""
    made = sh.shard_(
        model(seat.cell), plan, mesh(seat, gather), optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE),
        accumulate=seat.cell.accumulate, engine=engine, local=LOCAL.get(gather),  # type: ignore[call-overload]
    )  # fmt: skip
    return Ours(made, seat.data, WAYS.get(gather, 1))
