"""Fine-tuning over several ranks: the engine in the place of the optimizer, draws in the place of the sampler.

Every rank walks the same loop on its share of the rows. What it learns follows from the rows of a step and the draws
alone, so any plan on any number of ranks ends where one process does, up to rounding; dropout differs by rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.jobs.finetune.batches import window
from sparing.jobs.finetune.course import Course, groups_for
from sparing.jobs.finetune.draws import Draws, check_method, draws_for, first_interval
from sparing.jobs.finetune.loop import advance_
from sparing.jobs.finetune.outputs import folder_of
from sparing.jobs.finetune.prices import activations
from sparing.jobs.finetune.settings import Finetune, Training
from sparing.jobs.folder import Folder
from sparing.jobs.live import device_of, seeded
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.optimizer import adamw
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.ranks import held_out_loss, share_loss
from sparing.jobs.schedule import rate
from sparing.jobs.sharded import chosen, micro_steps, note_traffic, save, shape_of, share, step_of, summed, workload_of
from sparing.jobs.step import DivergedError
from sparing.layersample import LayerSampling
from sparing.layersample.checks import check_blocks
from sparing.layersample.parts import parts_of
from sparing.report import Record
from sparing.sharding import checkpoint
from sparing.sharding.apply import shard_
from sparing.sharding.config import Workload
from sparing.sharding.engine import Engine
from sparing.sharding.mesh import Mesh
from sparing.sharding.step_timing import MicroStep


@dataclass(slots=True)
class Crew:
    """What a rank needs to take part in a run."""

    mesh: Mesh
    """All ranks."""

    settings: Finetune
    """Of the run."""

    data: Packed
    """Training rows, of which the choice of a plan looks at the shape."""

    record: Record
    """Receives the tables "sharding" and "traffic"."""

    engine: Engine = field(init=False)
    """Made with the model, by ``equip``."""

    def equip(self, model: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, Draws | None]:
        """Shard a model; the engine's optimizer is that of the run.

        Args:
            model: What is frozen now stays frozen.
            training: Method and pace.

        Returns:
            Optimizer and draws.
        """
        method = training.method
        if isinstance(method, LayerSampling):
            check_method(method)
            blocks, frozen = parts_of(model, method.body)
            check_blocks(model, blocks, method)
            for name in frozen:  # ``begun`` gives the flags back
                named_parameters(model)[name].requires_grad_(False)
        work, micro = partial(self._work, model, training), partial(self._micro, model, training)
        plan, why = chosen(self.settings, self.mesh, work, micro)
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in groups_for(model, training)]
        self.engine = shard_(
            model,
            plan,
            self.mesh,
            optimizer=partial(adamw, lr=training.peak),
            groups=groups,
            accumulate=micro_steps(training.accumulate, self.mesh.world),
            clip=training.clip or None,
            body=method.body if isinstance(method, LayerSampling) else None,
            loss_scale=1.0,  # a step whose gradients are not finite is then left out
        )
        self.record.add("sharding", plan=plan.name, known_as=plan.known_as, why=why, **shape_of(self.mesh))
        draws = draws_for(self.engine, method, training.seed) if isinstance(method, LayerSampling) else None
        return self.engine.optimizer, draws

    def _work(self, model: nn.Module, training: Training) -> Workload:
        """What a step asks of memory and wires, with the blocks of the first interval."""
        (body, rest), seen = first_interval(model, training), 0
        if self.settings.memory is not None:
            nobody = Course(model, training, 1, adamw([torch.zeros(1)]), None)
            seen = activations(nobody, self.data, self.record)
        accumulate = micro_steps(training.accumulate, self.mesh.world)
        return workload_of(model, accumulate=accumulate, body=body, resting=rest, activation_bytes=seen)

    def _micro(self, model: nn.Module, training: Training) -> MicroStep:
        """The largest micro-step of the first step, to be timed."""
        rows = window(0, rows=self.data.rows, batch=training.batch, accumulate=training.accumulate, seed=training.seed)
        largest, (body, rest) = share(rows, 0, self.mesh.world)[0], first_interval(model, training)
        return MicroStep(model=model, loss=lambda: share_loss(model, self.data, largest), frozen=rest, body=body)

    def take_step_(self, course: Course, data: Packed) -> dict[str, Any]:
        """One optimizer step of all ranks.

        Args:
            course: The run; one step further afterwards.
            data: Training rows.

        Returns:
            A row of the table "train", the same on every rank but for the seconds.

        Raises:
            DivergedError: If loss or gradient are not finite; weights and optimizer are then as before the step.
        """
        begin, pace = time.perf_counter(), course.training
        lr = self._set_rate_(course)
        rows = window(course.step, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
        tokens = int((data.labels[rows.flatten()][:, 1:] != IGNORED).sum())
        mine = self._gradients_(course, data, rows)
        loss = summed(self.mesh, mine)[0] / tokens
        norm = self.engine.step(divisor=tokens if math.isfinite(loss) else math.nan)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"step {course.step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:g}")
        course.step += 1
        course.seen += rows.numel() * data.length
        course.seconds += time.perf_counter() - begin
        return {
            "step": course.step,
            "tokens": tokens,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "seconds": course.seconds,
        }

    def _set_rate_(self, course: Course) -> float:
        pace, factor = course.training, 1.0
        if isinstance(course.sampler, Draws):
            course.sampler.begin_step(course.step)
            factor = course.sampler.factor(course.step)
        lr = rate(course.step, peak=pace.peak, steps=course.steps, warmup=pace.warmup, schedule=pace.schedule)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * factor
        return lr

    def _gradients_(self, course: Course, data: Packed, rows: Tensor) -> float:
        """Run my share of a window; returns the sum of its losses."""
        pace, mesh, total = course.training, self.mesh, 0.0
        own = () if mesh.world == 1 else (mesh.rank,)
        with seeded(pace.seed, "dropout", course.step, *own, device=device_of(course.model)):
            for micro in share(rows, mesh.rank, mesh.world):
                loss = share_loss(course.model, data, micro)
                self.engine.backward(loss)
                total += loss.item()
        return total

    def walk(
        self, course: Course, data: Packed, record: Record, *, held_out: Packed | None, after: Callable[[Course], None]
    ) -> None:
        """Walk the run to its end; rank 0 shows how far it is.

        Args:
            course: The run.
            data: Training rows.
            record: Receives the rows of ``advance_``.
            held_out: Rows to measure on.
            after: Called after every step.
        """
        label = "" if self.mesh.rank else "fine-tune"
        how: dict[str, Any] = {"take": self.take_step_, "loss_of": partial(held_out_loss, self.mesh)}
        advance_(course, data, record, held_out=held_out, label=label, after=after, **how)
        note_traffic(self.mesh, record)

    def save(self, folder: Folder, course: Course, record: Record) -> Path:
        """Write a checkpoint.

        Args:
            folder: Of the run.
            course: The run, between two steps.
            record: Of the run so far.

        Returns:
            Its directory.
        """
        own = {"run": folder.whose(), "step": course.step}
        tree = own | {"seconds": course.seconds, "seen": course.seen, "rows": record.rows}
        return save(self.engine, folder, course.step, tree)

    def restore_(self, course: Course, path: Path) -> Mapping[str, Any]:
        """Put a freshly begun run where a checkpoint left it, on these ranks and under this plan.

        Args:
            course: The run.
            path: The checkpoint's directory.

        Returns:
            What ``save`` put beside it.
        """
        tree = checkpoint.load_(self.engine, path)
        folder_of(self.settings).check_own(path, tree)
        course.step, course.seconds, course.seen = step_of(path), tree["seconds"], tree["seen"]
        if isinstance(course.sampler, Draws) and course.step:
            course.sampler.adopt_(course.step - 1)
        return tree
