"""Four processes of this machine as a small cluster: a net that reads text, split by one plan after another.

python -P sharding_ranks.py WORK.json FOUND.json

It is started as a file, not as a module, to import little. The process imports torch once and forks the ranks, so that
four cost little more than one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.data import bundled_text
from sparing.report import Progress
from sparing.report.atomic import write_whole
from sparing.seeds import stream
from sparing.sharding import LowBit, Wires, make_mesh, shard_
from sparing.sharding.engine.engine import Engine
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.config import BucketSpec

VALUES = 256  # of a byte (count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the ranks do."""

    plans: tuple[str, ...] = ("NNN", "NNG", "IIG", "GGG")  # one after another, from the same weights on the same text
    few: tuple[str, ...] = ("IIG",)  # of these, the plans that also run with low-bit wires between groups
    bits: int = 8  # of those wires
    rounds: int = 3  # times that all of them run, one after another (count)
    groups: int = 2
    per_group: int = 2  # ranks of a group (count)
    width: int = 512
    blocks: int = 4
    context: int = 16  # bytes of text it sees before the next (count)
    batch: int = 16  # rows of a rank in a micro-step (count)
    accumulate: int = 4  # micro-steps (count)
    steps: int = 3  # optimizer steps (count); the first is not timed
    inter: float = 10e6  # a link between groups (bytes/s): 80 Mbit/s
    intra: float = 250e6  # a link inside a group (bytes/s): 2000 Mbit/s
    seed: int = 0  # of weights and rows

    @property
    def world(self) -> int:
        """Ranks (count)."""
        return self.groups * self.per_group


class Block(nn.Module):
    """Two linear maps beside a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, width) to the same."""
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Reader(nn.Module):
    """Predicts the next byte of a text from the bytes before."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.embed = nn.Embedding(VALUES, work.width // work.context)
        self.blocks = nn.ModuleList(Block(work.width) for _ in range(work.blocks))
        self.head = nn.Linear(work.width, VALUES)

    def forward(self, rows: Tensor) -> Tensor:
        """Bytes (rows, context) to scores (rows, 256)."""
        x = self.embed(rows).flatten(1)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def reader(work: Work) -> Reader:
    """The net with its first weights in float32, the same in every process."""
    made, generator = Reader(work), stream(work.seed, "demo", "reader")
    with torch.no_grad():
        for parameter in made.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.0
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return made


def specs_of(engine: Engine) -> tuple[BucketSpec, ...]:
    """The buckets of an engine, as predictions know them."""
    places = {stage.name: at for at, stage in enumerate(engine.flow.stages)} | {"embed": -1}
    return tuple(
        BucketSpec(
            elements=bucket.layout.length, trainable=bucket.trainable, root=bucket.root,
            block=places.get(bucket.block, len(engine.flow.stages)),
        )
        for bucket in engine.buckets
    )  # fmt: skip


def held_bytes(engine: Engine) -> int:
    """Bytes that this rank holds for parameters, gradients, masters, moments and residuals; every storage once."""
    found: dict[int, int] = {}
    moments = [value for state in engine.optimizer.state.values() for value in state.values()]
    slices = [bucket.store for bucket in engine.buckets]
    masters = [tensor for bucket in engine.buckets for tensor in engine.masters.held(bucket)]
    grads = [grad.acc for grad in engine.flow.gradients.values()]
    owed = [residual.value for residual in engine.residuals.values()]
    for tensor in (*slices, *masters, *grads, *moments, *owed):
        if isinstance(tensor, Tensor) and tensor.ndim:
            storage = tensor.untyped_storage()
            # by address: views of one buffer count once
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def run_plan(work: Work, plan: str, mesh: Mesh, text: Tensor, bar: Progress | None) -> dict[str, Any]:
    """Train by one plan, counting the bytes sent in the last step and timing the quickest."""
    net = reader(work)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    engine = shard_(net, plan, mesh, optimizer=optimizer, accumulate=work.accumulate, engine="sparing")
    losses, seconds, live, sent = [], [], 0, {}
    for step in range(work.steps):
        # a barrier: the clock starts when all have arrived
        mesh.gather_scalars(torch.zeros(1))
        mesh.counter.reset()
        start = time.perf_counter()
        losses.append(_backward(work, step, engine, text))
        # before the step, while the gradients are still there
        live = held_bytes(engine)
        engine.step()
        engine.flush()
        mesh.drain()
        seconds.append(float(mesh.gather_scalars(torch.tensor([time.perf_counter() - start])).max()))
        sent = dict(mesh.counter.sent)
        if bar is not None:
            bar.advance(plan=plan, loss=losses[-1])
    found = [asdict(spec) for spec in specs_of(engine)]
    engine.close()
    return {
        "plan": plan, "losses": losses, "sent": sent, "held": live, "seconds": min(seconds[1:]), "buckets": found,
    }  # fmt: skip


def _backward(work: Work, step: int, engine: Engine, text: Tensor) -> float:
    """All micro-steps of a step; gives the mean loss over ranks."""
    total = 0.0
    for micro in range(work.accumulate):
        generator = stream(work.seed, "demo", f"rows {step} {micro} {engine.mesh.rank}")
        starts = torch.randint(len(text) - work.context - 1, (work.batch,), generator=generator)
        rows = torch.stack([text[start : start + work.context + 1] for start in starts])
        loss = F.cross_entropy(engine.model(rows[:, :-1]), rows[:, -1])
        engine.backward(loss)
        total += loss.item() / work.accumulate
    return float(engine.mesh.gather_scalars(torch.tensor([total], dtype=torch.float64)).mean())


def run_rank(rank: int, work: Work, folder: str, out: Path) -> None:
    """All plans on one rank; rank 0 writes what was found."""
    # each rank would otherwise start a thread for every core, and they share the cores of one machine
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=work.world)
    text = torch.tensor(list(bundled_text("alice").encode()))
    total = work.rounds * (len(work.plans) + len(work.few)) * work.steps
    bar = Progress(f"split over {work.world} processes", total=total, unit="step") if rank == 0 else None
    rate = {"inter": work.inter, "intra": work.intra}
    arranged = partial(make_mesh, groups=work.groups, per_group=work.per_group)
    found: list[dict[str, Any]] = []
    with (
        arranged(wires=Wires(rate=rate)) as mesh,
        arranged(wires=Wires(rate=rate, slow=LowBit(bits=work.bits))) as few,
    ):
        with bar or contextlib.nullcontext():
            for number in range(work.rounds):
                # side by side in a round, so that a machine that slows down slows all of them
                for bits, plans, over in ((32, work.plans, mesh), (work.bits, work.few, few)):
                    rows = (run_plan(work, plan, over, text, bar) for plan in plans)
                    found += [row | {"bits": bits, "round": number} for row in rows]
        if rank == 0:
            write_whole(out, json.dumps(found))
        mesh.gather_scalars(torch.zeros(1))
    # without the interpreter's shutdown: threads of the closed lanes need not be waited for
    os._exit(0)


def main(given: str, out: str) -> int:
    """Fork the ranks and wait for them; 0, or 1 if one failed."""
    # imported once here instead of in every forked rank
    import torch.distributed.tensor  # noqa: F401

    work = Work(**json.loads(Path(given).read_text(encoding="utf-8")))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, work, folder, Path(out)) for rank in range(work.world)]
        ranks = [context.Process(target=run_rank, args=each, daemon=True) for each in arguments]
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and all(rank.exitcode in {None, 0} for rank in ranks):
            time.sleep(0.05)
        failed = any(rank.exitcode != 0 for rank in ranks)
        for rank in ranks:
            rank.kill()
            rank.join()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
