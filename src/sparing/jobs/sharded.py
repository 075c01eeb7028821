"""A model over several processes: which plan shards it, and the steps and checkpoints of what is sharded.

plan, why = choose_plan(settings, ranks.mesh, lambda: workload_of(model, accumulate=micro_steps(8, ranks.world)))
stepper = shard_model_(settings, model, plan, ranks.mesh, optimizer=...)
run.attach(stepper)                            # its slices are saved beside every checkpoint
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks
from sparing.jobs.parallel import AUTO, NO_PLAN, join_alone
from sparing.jobs.settings import Parallel
from sparing.memory.sizes import parse_bytes
from sparing.report import Record
from sparing.sharding import checkpoint
from sparing.sharding.apply import engine_for, shard_
from sparing.sharding.engine.engine import Engine
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.levels import Plan, effective
from sparing.sharding.local.outer import Outer
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.probe import measure
from sparing.sharding.network.step_timing import MicroStep, time_on_all_ranks
from sparing.sharding.planner.choose import choose
from sparing.sharding.planner.config import BucketSpec, Topology, Workload


@dataclass(slots=True)
class ShardedStepper:
    """The steps of an engine, with what the run engine saves of it: the ``Stepper`` and ``Slices`` of a sharded run."""

    engine: Engine | FsdpEngine
    # The model without values, as it was before ``fully_shard``, which gives none back; with our engine none.
    outline: nn.Module | None = None
    sharded: bool = True
    count: int = field(default=1, init=False)  # losses that the step under way is a mean of

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of the slices."""
        return self.engine.optimizer

    @property
    def _outer(self) -> Outer | None:
        """How groups that train alone meet; none where all ranks take each step together."""
        return None if isinstance(self.engine, FsdpEngine) else self.engine.outer

    def backward(self, loss: Tensor, count: int) -> None:
        """Add the gradient of a sum of losses, of which the whole step has so many over all ranks."""
        self.count = count
        self.engine.backward(loss)

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip and apply what was added on all ranks; returns loss and norm, of groups that train alone the largest."""
        value, groups = float(loss), 1 if self._outer is None else self._outer.groups
        # a divisor that is not finite makes the engine skip the step on every rank
        norm = self.engine.step(divisor=self.count / groups if math.isfinite(value) else math.nan)
        if groups > 1:
            # all ranks must decide alike, and a norm that is not finite is the largest
            norm = self.engine.mesh.gather_scalars(torch.tensor([norm], dtype=torch.float64)).max().item()
        return value, norm

    def finish_(self) -> None:
        """Bring all groups to the same weights."""
        if not isinstance(self.engine, FsdpEngine):
            self.engine.outer_step()

    def clear_(self) -> None:
        """Do nothing: the engine drops gradients as it steps."""

    def save(self, folder: Path) -> None:
        """Write the slices of all ranks."""
        checkpoint.save(self.engine, folder)

    def load_(self, folder: Path) -> None:
        """Take up slices that any number of ranks wrote under any plan."""
        checkpoint.load_(self.engine, folder)

    def unshard_(self) -> nn.Module:
        """End the engine; the model with whole weights, each in memory of its own. All ranks call."""
        self.finish_()
        if isinstance(self.engine, FsdpEngine):
            assert self.outline is not None
            whole = filled_(self.outline, self.engine)
            self.engine.close()
            return whole
        self.engine.close()
        for parameter in self.engine.model.parameters():
            # a view of a bucket would keep the whole bucket, and safetensors refuses to save what shares storage
            parameter.data = parameter.data.clone()
        return self.engine.model

    def note_plan(self, record: Record, plan: Plan, why: str) -> None:
        """Add the table "sharding": the plan, and the ranks it is for."""
        mesh = self.engine.mesh
        shape: dict[str, Any] = {"ranks": mesh.world, "groups": mesh.sizes[-1], "backend": mesh.backend}
        if (outer := self._outer) is not None:
            shape |= {"local_every": outer.settings.every}
        engine = "fsdp2" if isinstance(self.engine, FsdpEngine) else "sparing"
        record.add("sharding", plan=plan.name, known_as=plan.known_as, why=why, engine=engine, **shape)

    def note_traffic(self, record: Record) -> None:
        """Add the table "traffic": bytes and messages this rank has sent since it began, evaluation included."""
        mesh = self.engine.mesh
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
            sent, messages = mesh.counter.sent[axis.name], mesh.counter.messages[axis.name]
            record.add("traffic", axis=axis.name, ranks=size, sent=sent, messages=messages)


def shard_model_(settings: Parallel, model: nn.Module, plan: Plan, mesh: Mesh, **how: Any) -> ShardedStepper:
    """Shard a model by the engine that was asked for, or that its device takes; ``how`` is for ``shard_``."""
    engine = settings.engine or engine_for(model, mesh)
    if engine == "sparing":
        return ShardedStepper(shard_(model, plan, mesh, engine=engine, **how))
    if mesh.world == 1:
        join_alone()
    outline = outline_of(model)
    return ShardedStepper(shard_(model, plan, mesh, engine="fsdp2", **how), outline)


def outline_of(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters take no memory; tied ones stay tied."""
    # One number for each, on its device, so that ``data`` can be set later. What is here, deepcopy takes for a copy.
    made = {id(p): nn.Parameter(p.new_zeros(()).expand(p.shape), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, dict[int, Any](made))


@torch.no_grad()
def filled_(outline: nn.Module, engine: FsdpEngine) -> nn.Module:
    """Give an outline the whole weights and buffers of an engine's model; all ranks call."""
    state = engine.full_state_dict()
    for name, parameter in outline.named_parameters():
        parameter.data = state[name]
    for name, buffer in engine.model.named_buffers():
        outline.get_buffer(name).data = buffer.detach().clone()
    return outline.train(engine.model.training)


def workload_of(
    model: nn.Module, *, accumulate: int, body: str | Sequence[str] | None = None, resting: Collection[str] = (),
    moments: int = 2, activation_bytes: int = 0,
) -> Workload:  # fmt: skip
    """What a live model, before it is sharded, asks of memory and network; ``choose_plan`` finds how long it computes.

    ``accumulate`` is in micro-steps of a rank; blocks named in ``resting`` do not train at first; the optimizer keeps
    ``moments`` numbers of each weight.
    """
    blocks, specs = find_blocks(model, body=body), []
    depth = sum(block.role == "body" for block in blocks)
    for block in blocks:
        at = block.index if block.role == "body" else -1 if block.role == "embed" else depth
        for trains in (True, False):
            size = sum(p.numel() for p in block.params.values() if p.requires_grad is trains)
            if size:
                live = trains and block.name not in resting
                shapes = tuple(tuple(p.shape) or (1,) for p in block.params.values() if p.requires_grad is trains)
                root = block.role != "body"
                specs.append(BucketSpec(elements=size, trainable=live, root=root, block=at, shapes=shapes))
    width = max(p.dtype.itemsize for p in model.parameters())
    # 16-bit weights have 32-bit copies; gradients, messages and moments are of their size
    exact = max(width, 4)
    state = moments * exact + (exact if exact != width else 0)
    sizes = {"param_bytes": width, "grad_bytes": exact, "wire_bytes": exact, "state_bytes": state}
    return Workload.of(specs, accumulate=accumulate, activation_bytes=activation_bytes, **sizes)


def _alone(topology: Topology) -> list[Plan]:
    """Plans under which a group has all that it needs for a step."""
    return [plan for plan in effective(topology.tiers) if "G" not in plan.name]


def choose_plan(
    settings: Parallel, mesh: Mesh, workload: Callable[[], Workload], micro: Callable[[], MicroStep] | None = None
) -> tuple[Plan, str]:
    """The plan of a run, the same on every rank, and why it is that; without ``micro`` the network alone counts."""
    if settings.plan == NO_PLAN:
        return Plan("NNN"), "an interrupted run with a plan goes on without one"
    if settings.plan != AUTO:
        return Plan(settings.plan), "asked for"
    if mesh.world == 1:
        return Plan("NNN"), "one process has nothing to share"
    topology = measure(mesh) if settings.topology is None else Topology.read(settings.topology)
    work, pace, memory = workload(), None, settings.memory
    # a rank holds the whole model and a micro-step while one is timed
    room = memory is None or work.params * work.param_bytes + work.activations <= parse_bytes(memory)
    if micro is not None and room:
        pace = time_on_all_ranks(mesh, micro())
    if pace is not None:
        work = replace(work, seconds_forward=pace.forward, seconds_backward=pace.backward)
    engine = settings.engine or ("fsdp2" if mesh.device.type == "cuda" else work.engine)
    work = replace(work, engine=engine)
    choice = choose(work, topology, memory, plans=None if settings.local.every == 0 else _alone(topology))
    # the choice of rank 0 for all: measured speeds must not lead two ranks to two plans
    letters = torch.tensor([ord(letter) for letter in choice.plan.name])
    plan = Plan("".join(map(chr, mesh.gather_scalars(letters)[0].tolist())))
    why = f"{choice.best.why}, by {pace or 'the wires alone'}"
    if mesh.rank == 0:
        sizes = " × ".join(map(str, mesh.sizes[::-1]))
        sys.stderr.write(f"plan: {plan} of {len(choice.ranking)} on {sizes} ranks; {why}\n")
    return plan, why
