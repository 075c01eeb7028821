"""The library as an arm: any plan, on a mesh that all plans of a cell share."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.network.arms import Running, Seat
from benchmarks.network.problem import LEARNING_RATE, Data, model
from sparing import sharding as sh
from sparing.sharding.throttle import Pace
from sparing.sharding.wires import Wires


class Ours:
    """An engine; what is in flight after a step is finished by ``flush``."""

    def __init__(self, engine: sh.Engine, data: Data) -> None:
        self.engine, self.data = engine, data
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
        self.engine.flush()

    def sent(self) -> dict[str, int]:
        """Payload bytes that the rings of this rank have sent, by axis."""
        return dict(self.engine.mesh.counter.sent)

    def close(self) -> None:
        """The mesh is the cell's, and closed with it."""
        self.engine.flush()


def mesh(seat: Seat, gather: str = "two-level") -> sh.Mesh:
    """The cell's mesh for one way of gathering, made once."""
    if gather not in seat.meshes:
        cell = seat.cell
        rate = {}
        if seat.throttled:
            for axis, bits in (("intra", cell.intra), ("inter", cell.inter)):
                rate[axis] = Pace(rate=bits / 8, sharing=cell.per_group)
        own = {"gather": gather, "rate": rate}
        # gloo's collectives over the world count no bytes and hold none back
        wires = Wires(**({"kind": "builtin", "gather": "flat"} if gather == "gloo" else own))  # type: ignore[arg-type]
        seat.meshes[gather] = sh.make_mesh(groups=cell.groups, per_group=cell.per_group, wires=wires)
    return seat.meshes[gather]


def prepare(seat: Seat, plan: str, *, gather: str = "two-level") -> Running:
    """One plan on this rank."""
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE)
    engine = sh.shard_(model(seat.cell), plan, mesh(seat, gather), optimizer=optimizer, accumulate=seat.cell.accumulate)
    return Ours(engine, seat.data)
