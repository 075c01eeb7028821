"""Schedules of ``torch.distributed.pipelining`` over an engine on ``fully_shard``: one of them is one micro-step.

A schedule runs the backward passes of its micro-batches itself. torch keeps their whole gradients (``stage.py`` turns
``set_requires_gradient_sync`` off in each), calls every unit's post-backward once when all have run, and then divides
what it finds in ``grad``. Ours finds nothing there, so the engine divides what it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from sparing.errors import require
from sparing.sharding.engine.state import Settings
from sparing.sharding.fsdp.units import Pass, Unit
from sparing.sharding.network.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule


def factor_of(schedule: _PipelineSchedule, model: nn.Module, mesh: Mesh, settings: Settings, now: Pass) -> int:
    """By what a schedule divides the sum over its micro-batches; refuses those that this engine cannot run."""
    # only who has a pipeline pays for the import
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    single, kind = isinstance(schedule, PipelineScheduleSingle), type(schedule).__name__
    why, do = "an engine has one stage, and a norm counts one of each rank", "use ScheduleGPipe or Schedule1F1B"
    require(single, "schedule", kind, why, do)
    assert isinstance(schedule, PipelineScheduleSingle)
    stage, known = schedule._stage, 1 if mesh.stages is None else mesh.stages.world
    why, do = "gradients of that one go elsewhere", "make the stage of the model that shard_ was given"
    require(stage.submod is model, "schedule", f"a stage of another {type(stage.submod).__name__}", why, do)
    why, do = "norms and clipping are over all stages", 'pass make_mesh(within=mesh["dp"], stages=mesh["pp"])'
    require(stage.num_stages == known, "schedule", f"{stage.num_stages} stages, the mesh {known}", why, do)
    why, do = "the schedule makes the loss, which nothing scales", "leave it out, and train in bfloat16"
    require(settings.loss_scale is None, "loss_scale", f"{settings.loss_scale}, with a schedule", why, do)
    why = f"whole gradients of engine.backward wait for the step's last pass, and would be divided by {kind}, too"
    require(not now.holding, "schedule", "one after engine.backward in a step", why, "run schedules first")
    return schedule._n_microbatches if schedule.scale_grads else 1


def check_handed(units: Sequence[Unit], now: Pass) -> None:
    """Refuse a pass in which no schedule has run, or not to its end."""
    trained = [unit.name for unit in units if unit.on]
    why, do = "a micro-step needs its gradients", "call schedule.step(…) inside, with the schedule's loss_fn"
    require(bool(now.handed) or not trained, "pipeline", "no gradients of a schedule", why, do)
