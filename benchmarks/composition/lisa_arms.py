"""What a rank trains: all blocks, or drawn ones, under every plan; started by ``lisa_sharding``, never by hand.

A round is an interval: each sampled arm first switches its blocks, which is timed and counted alone, then takes its
steps. Draws follow from seed and round, so all plans of a share train the same blocks in the same round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.network import workers
from benchmarks.network.arms import Alone, Running, Seat
from benchmarks.network.cells import Cell
from benchmarks.network.engine_arm import Ours, mesh
from benchmarks.network.problem import LEARNING_RATE, model
from sparing import sharding as sh
from sparing.jobs.finetune.sharded import ShardedSampler
from sparing.layersample import LayerSampling, Sampler

NO_PLAN = "alone"
"""In the place of a plan: the arithmetic without any message."""


@dataclass(frozen=True)
class Arm:
    """A plan, and how many blocks train."""

    plan: str
    active: int
    """Blocks drawn (count); 0: all train."""

    @property
    def name(self) -> str:
        """As in the records: ``IIG``, ``IIG lisa-2``."""
        return f"{self.plan} lisa-{self.active}" if self.active else self.plan

    @classmethod
    def of(cls, name: str) -> Arm:
        """Read a name."""
        plan, _, active = name.partition(" lisa-")
        return cls(plan, int(active or 0))


def settings(active: int) -> LayerSampling:
    """Nothing but the drawn blocks trains; the interval is the index of the round."""
    return LayerSampling(active=active, period=1, embed=False, tail=False, head=False)


class Switching(Running, Protocol):
    """An arm whose blocks change."""

    drawn: tuple[int, ...]

    def switch(self, interval: int) -> None:
        """Let the blocks of an interval train."""
        ...


class Sampled(Ours):
    """An engine whose blocks thaw and freeze as in ``sparing finetune --method lisa --plan``."""

    def __init__(self, engine: sh.Engine, seat: Seat, active: int) -> None:
        super().__init__(engine, seat.data)
        self.draws = ShardedSampler(engine, settings(active), seat.cell.seed) if active else None
        self.drawn: tuple[int, ...] = ()

    def switch(self, interval: int) -> None:
        """Freeze and thaw, on all ranks alike."""
        if self.draws is not None:
            self.draws.begin_step(interval)
            self.drawn = self.draws.active


class SampledAlone(Alone):
    """The arithmetic of the same blocks, without messages, by the sampler of one process."""

    drawn: tuple[int, ...] = ()
    sampler: Sampler | None = None

    def switch(self, interval: int) -> None:
        """Switch by the sampler."""
        if self.sampler is not None:
            self.sampler.begin_step(interval)
            self.drawn = self.sampler.active


def build(seat: Seat, name: str) -> Switching:
    """One arm on this rank."""
    arm, cell = Arm.of(name), seat.cell
    net = model(cell)
    if arm.plan == NO_PLAN:
        alone = SampledAlone(net=net, data=seat.data, micros=cell.accumulate)
        if arm.active:
            alone.sampler = Sampler(net, alone.optimizer, settings(arm.active), seed=cell.seed)
        return alone
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE)
    return Sampled(
        sh.shard_(net, arm.plan, mesh(seat), optimizer=optimizer, accumulate=cell.accumulate), seat, arm.active
    )


def counted(arm: Running, act: Callable[[], None]) -> tuple[float, dict[str, int], dict[str, int]]:
    """Seconds of an act, bytes that left the interfaces around it, and payload of the rings."""
    dist.barrier()
    left, rung, start = workers.sent(), workers.payload(arm), time.perf_counter()
    act()
    seconds = time.perf_counter() - start
    dist.barrier()
    after, ringing = workers.sent(), workers.payload(arm)
    more = {axis: size - rung.get(axis, 0) for axis, size in ringing.items()}
    return seconds, {axis: after[axis] - left[axis] for axis in after}, more


def switched(arm: Switching, turn: int) -> dict[str, Any]:
    """What the switch of a round costs; the same count around nothing is taken off."""
    _, nothing, _ = counted(arm, lambda: None)
    seconds, left, rung = counted(arm, lambda: arm.switch(turn))
    net = {axis: left[axis] - nothing[axis] for axis in left}
    return {"seconds": seconds, "sent": net, "payload": sum(rung.values())}


def sampled_job(job: dict[str, Any]) -> None:
    """All arms of a cell in turn, round after round; the first round warms up and says how many steps fit."""
    seat = Seat(cell=Cell(**job["cell"]), rank=dist.get_rank())
    arms: dict[str, Switching] = {}
    steps: dict[str, int] = {}
    try:
        for name in job["arms"]:
            workers.answer("at", arm=name, doing="build")
            arms[name] = build(seat, name)
        for turn in range(job["rounds"] + 1):
            for name, arm in arms.items():
                workers.answer("at", arm=name, doing=f"round {turn}")
                switch = switched(arm, turn)
                found = workers.measured(arm, steps.get(name, 1))
                if turn == 0:
                    steps[name] = workers.fitting(found["seconds"], job)
                more = {"turn": turn, "steps": steps[name], "drawn": arm.drawn, "switch": switch}
                workers.answer("round", arm=name, **more, **found)
    finally:
        for arm in arms.values():
            arm.close()
        seat.close()
        arms.clear()
        gc.collect()


if __name__ == "__main__":
    workers.KINDS["sampled"] = sampled_job
    workers.main()
