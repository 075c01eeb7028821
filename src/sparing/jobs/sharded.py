"""A run over several ranks, for every job that takes ``--plan``: they meet, share the rows, and tell who is lost.

with ranks(settings) as mesh:                  # None for plan "none"
    plan, why = chosen(settings, mesh, lambda: workload_of(model, accumulate=micro_steps(8, mesh.world)))
    engine = shard_(model, plan, mesh, ...)
    for part in share(rows, mesh): ...         # rows of this rank, micro-step by micro-step
    save(engine, folder, step, tree)
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparing.blocks import find_blocks
from sparing.errors import RunError, UserError, require
from sparing.jobs import checkpoint
from sparing.jobs.folder import CHECKPOINTS, Folder
from sparing.jobs.interrupts import patient
from sparing.jobs.limits import at_least
from sparing.jobs.roll import Roll
from sparing.memory.sizes import parse_bytes
from sparing.report import Record
from sparing.sharding import checkpoint as cuts
from sparing.sharding.config import BucketSpec, Topology, Workload
from sparing.sharding.engine import Engine
from sparing.sharding.levels import Plan
from sparing.sharding.mesh import Mesh, make_mesh
from sparing.sharding.planner import choose
from sparing.sharding.probe import measure
from sparing.sharding.rendezvous import join
from sparing.sharding.step_timing import MicroStep, time_on_all_ranks

ALONE, AUTO = "none", "auto"
"""Plans that are none: one process without an engine, and the one that ``choose`` finds."""

SPREAD = ("plan", "groups", "topology", "memory")
"""Settings that may differ when a run is resumed: on any ranks and under any plan it is the same run."""


class Spread(Protocol):
    """Settings of a run over several ranks."""

    @property
    def plan(self) -> str:
        """``none``, ``auto`` or a plan's letters."""
        ...

    @property
    def groups(self) -> int | None:
        """Groups of ranks (count)."""
        ...

    @property
    def topology(self) -> Path | None:
        """File of the machine."""
        ...

    @property
    def memory(self) -> str | None:
        """Memory of a rank."""
        ...

    @property
    def device(self) -> str:
        """``auto``, ``cpu`` or ``cuda``."""
        ...


def check_spread(settings: Spread) -> None:
    """Refuse settings of a run over several ranks that cannot work.

    Args:
        settings: Of the run.
    """
    at_least(1, settings, "groups")
    given = [name for name in SPREAD[1:] if getattr(settings, name) is not None]
    if settings.plan == ALONE:
        why, do = "nothing is cut without a plan", "pass --plan auto, or leave it away"
        require(not given, given[0] if given else "", getattr(settings, given[0]) if given else "", why, do)
        return
    both = settings.groups is not None and settings.topology is not None
    require(not both, "groups", settings.groups, "the topology file has them", "pass one of the two")
    if settings.plan != AUTO:
        Plan(settings.plan)
        do = "pass --plan auto, or leave it away"
        require(settings.memory is None, "memory", settings.memory, "it is for the choice of a plan", do)
    if settings.memory is not None:
        parse_bytes(settings.memory)


@contextlib.contextmanager
def ranks(settings: Spread) -> Iterator[Mesh | None]:
    """Meet all ranks, and part in order; if one is lost meanwhile, the others end with a line that names it.

    Args:
        settings: Of the run.

    Yields:
        The mesh, or None for the plan ``none``.

    Raises:
        UserError: If several processes shall train without a plan, or their number does not fit.
        RunError: If a rank does not come, or is lost.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.plan == ALONE:
        why = f"each of {world} processes would train and write the same"
        require(world == 1, "plan", ALONE, why, "pass --plan auto, or start one process")
        yield None
        return
    started = world > 1 and not dist.is_initialized()
    topology = None if settings.topology is None else Topology.read(settings.topology)
    if started:
        _take_device(settings)
        join(30.0, backend="gloo" if settings.device == "cpu" else None)
    mesh = make_mesh(**({"groups": settings.groups} if topology is None else {"sizes": topology.sizes}))
    roll = Roll(mesh)
    try:
        yield mesh
    except BaseException as error:
        with patient(always=True):  # torchrun ends everybody as soon as one is gone, but it waits half a minute
            roll.tell(error)
            lost = roll.lost(error)
        if lost:
            raise RunError(lost) from error
        raise
    finally:
        roll.end()
        mesh.close()
        if started:  # in any case: an interpreter that ends with live groups hangs
            dist.destroy_process_group()


def _take_device(settings: Spread) -> None:
    if settings.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


# ---- rows


def micro_steps(accumulate: int, world: int) -> int:
    """Micro-steps that a rank takes in a step, so that none holds more rows at once than one process would.

    Args:
        accumulate: Micro-batches of a step (count).
        world: Ranks (count).

    Returns:
        At least 1.

    Example:
        >>> micro_steps(8, 1), micro_steps(8, 3), micro_steps(2, 4)
        (8, 3, 1)
    """
    return math.ceil(accumulate / world)


def share(rows: Tensor, rank: int, world: int) -> list[Tensor]:
    """The rows that a rank reads in each micro-step; over all ranks and micro-steps, every row of the window once.

    Args:
        rows: Of one step, shape (accumulate, batch).
        rank: Which.
        world: Ranks (count).

    Returns:
        For each micro-step at most ``batch`` rows; none where there are fewer rows than ranks.

    Example:
        >>> share(torch.arange(6).view(3, 2), 1, 2)
        [tensor([2]), tensor([5])]
    """
    parts = torch.tensor_split(rows.flatten(), micro_steps(len(rows), world))
    return [torch.tensor_split(part, world)[rank] for part in parts]


def summed(mesh: Mesh, *numbers: float) -> list[float]:
    """Numbers added up over the ranks, the same bits on all.

    Args:
        mesh: The ranks.
        numbers: Of this rank.

    Returns:
        The sums.
    """
    total: list[float] = mesh.gather_scalars(torch.tensor(numbers, dtype=torch.float64)).sum(0).tolist()
    return total


def heard(mesh: Mesh, signals: Sequence[int]) -> list[int]:
    """Whether to stop: on all ranks if a signal came to any.

    Args:
        mesh: The ranks.
        signals: Noted on this rank.

    Returns:
        Signals; none if all go on.
    """
    return [1] if summed(mesh, len(signals))[0] else []


# ---- the plan


def workload_of(
    model: nn.Module,
    *,
    accumulate: int,
    body: str | Sequence[str] | None = None,
    resting: Collection[str] = (),
    moments: int = 2,
    activation_bytes: int = 0,
) -> Workload:
    """What a live model asks of memory and wires; how long it computes ``chosen`` finds out.

    Args:
        model: Before it is sharded.
        accumulate: Micro-steps of a step (count).
        body: Where its repeated blocks are.
        resting: Names of blocks that do not train at first.
        moments: What the optimizer keeps of each weight (count).
        activation_bytes: Of a micro-step (bytes).

    Returns:
        The workload of its buckets.
    """
    blocks, specs = find_blocks(model, body=body), []
    depth = sum(block.role == "body" for block in blocks)
    for block in blocks:
        at = block.index if block.role == "body" else -1 if block.role == "embed" else depth
        for trains in (True, False):
            size = sum(p.numel() for p in block.params.values() if p.requires_grad is trains)
            if size:
                live = trains and block.name not in resting
                specs.append(BucketSpec(elements=size, trainable=live, root=block.role != "body", block=at))
    width = max(p.dtype.itemsize for p in model.parameters())
    exact = max(width, 4)
    state = moments * exact + (exact if exact != width else 0)
    sizes = {"param_bytes": width, "grad_bytes": exact, "wire_bytes": exact, "state_bytes": state}
    return Workload.of(specs, accumulate=accumulate, activation_bytes=activation_bytes, **sizes)


def chosen(
    settings: Spread, mesh: Mesh, workload: Callable[[], Workload], micro: Callable[[], MicroStep] | None = None
) -> tuple[Plan, str]:
    """The plan of a run: the one that was asked for, or the best for this model and machine.

    Args:
        settings: ``plan``, ``topology`` and ``memory``.
        mesh: The ranks.
        workload: What is trained.
        micro: A micro-step to time, so that it is known what hides behind arithmetic; none: wires alone count.

    Returns:
        The plan, the same on every rank, and why it is that.
    """
    if settings.plan != AUTO:
        return Plan(settings.plan), "asked for"
    if mesh.world == 1:
        return Plan("NNN"), "one process has nothing to share"
    topology = measure(mesh) if settings.topology is None else Topology.read(settings.topology)
    work, pace = workload(), None
    if micro is not None and _room_for(work, settings.memory):
        pace = time_on_all_ranks(mesh, micro())
    if pace is not None:
        work = replace(work, seconds_forward=pace.forward, seconds_backward=pace.backward)
    choice = choose(work, topology, settings.memory)
    letters = torch.tensor([ord(letter) for letter in choice.plan.name])
    plan = Plan("".join(map(chr, mesh.gather_scalars(letters)[0].tolist())))
    why = f"{choice.best.why}, by {pace or 'the wires alone'}"
    if mesh.rank == 0:
        sizes = " × ".join(map(str, mesh.sizes[::-1]))
        sys.stderr.write(f"plan: {plan} of {len(choice.ranking)} on {sizes} ranks; {why}\n")
    return plan, why


def _room_for(work: Workload, memory: str | None) -> bool:
    """Whether a rank may hold the whole model and a micro-step, as it does while one is timed."""
    return memory is None or work.params * work.param_bytes + work.activations <= parse_bytes(memory)


# ---- checkpoints


def save(engine: Engine, folder: Folder, step: int, tree: Mapping[str, Any]) -> Path:
    """Write a checkpoint from all ranks, then delete all but the newest two.

    Args:
        engine: Between two steps.
        folder: Of the run, on a disk that all ranks see.
        step: Optimizer steps finished (count).
        tree: Plain values that ``checkpoint.load_`` gives back, as rank 0 has them.

    Returns:
        The checkpoint's directory.
    """
    target = folder.at(CHECKPOINTS) / checkpoint.name_of(step)
    cuts.save(engine, target, extra=dict(tree))
    if engine.mesh.rank == 0:
        for path in checkpoint.saved(target.parent)[: -checkpoint.KEPT]:
            shutil.rmtree(path, ignore_errors=True)
    return target


def part_(engine: Engine) -> None:
    """Give a model its whole weights back, each in memory of its own.

    Args:
        engine: Between two steps; closed afterwards.
    """
    engine.close()
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone()


def shape_of(mesh: Mesh) -> dict[str, Any]:
    """Ranks as columns of a table.

    Args:
        mesh: The ranks.

    Returns:
        ``ranks`` and ``groups`` (counts), and ``backend``.
    """
    return {"ranks": mesh.world, "groups": mesh.sizes[-1], "backend": mesh.backend}


def note_traffic(mesh: Mesh, record: Record) -> None:
    """Add the table "traffic": what this rank has sent since it began, evaluation included.

    Args:
        mesh: The ranks.
        record: Receives a row per axis.
    """
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        name = axis.name
        record.add("traffic", axis=name, ranks=size, sent=mesh.counter.sent[name], messages=mesh.counter.messages[name])


def newest(folder: Folder) -> Path | None:
    """The checkpoint that a resumed run goes on from.

    Args:
        folder: Of the run.

    Returns:
        Its directory, or None where the run begins.

    Raises:
        UserError: If it was written without a plan.
    """
    found = checkpoint.saved(folder.at(CHECKPOINTS)) if folder.resume else []
    if not found:
        return None
    whole = (found[-1] / checkpoint.TREE).is_file()
    why, do = f"{found[-1].name} was written without a plan", "resume without --plan, or start anew with --overwrite"
    require(not whole, "plan", "one", why, do)
    return found[-1]


def step_of(path: Path | None) -> int:
    """The step after which a checkpoint was written.

    Args:
        path: Its directory; None for the beginning.

    Returns:
        Optimizer steps finished (count).
    """
    return 0 if path is None else int(path.name.rpartition("-")[2])


def refuse_cut(folder: Folder) -> None:
    """Refuse to resume without a plan what was written with one.

    Args:
        folder: Of the run.

    Raises:
        UserError: If so.
    """
    found = checkpoint.saved(folder.at(CHECKPOINTS)) if folder.resume else []
    if found and (found[-1] / checkpoint.MANIFEST).is_file() and not (found[-1] / checkpoint.TREE).is_file():
        why, do = f"{found[-1].name} was written with a plan", "pass --plan NNN, which one process can run too"
        raise UserError("plan", got=ALONE, why=why, do=do)
