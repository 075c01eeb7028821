"""Training from scratch over several ranks: the groups of the scaling plan on an engine, masks as they were drawn.

A masked weight is zero and so is its gradient, on every rank and in every slice; AdamW and SGD leave it there. Any plan
on any number of ranks ends where one process does, up to rounding.
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
from torch.nn import functional as F

from sparing.jobs.folder import Folder
from sparing.jobs.live import device_of, seeded
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.ranks import held_out_loss
from sparing.jobs.pretrain.choices import law_of
from sparing.jobs.pretrain.course import Course, live_share
from sparing.jobs.pretrain.loop import advance_
from sparing.jobs.pretrain.material import Part, crops
from sparing.jobs.pretrain.optimizers import factory_for, groups_for
from sparing.jobs.pretrain.outputs import folder_of
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.step import batch_of, set_rates_
from sparing.jobs.sharded import chosen, note_traffic, save, shape_of, share, step_of, summed, workload_of
from sparing.jobs.step import DivergedError
from sparing.report import Record
from sparing.scaling.apply import apply_
from sparing.scaling.plan import Plan
from sparing.seeds import stream
from sparing.sharding import checkpoint
from sparing.sharding.apply import shard_
from sparing.sharding.engine import Engine
from sparing.sharding.mesh import Mesh
from sparing.sharding.step_timing import MicroStep


@dataclass(slots=True)
class Crew:
    """What a rank needs to take part in a run."""

    mesh: Mesh
    """All ranks."""

    settings: Pretrain
    """Of the run."""

    record: Record
    """Receives the tables "sharding" and "traffic"."""

    engine: Engine = field(init=False)
    """Made with the model, by ``begin``."""

    def begin(self, model: nn.Module, train: Tensor, plan: Plan) -> Course:
        """Scale a fresh model, draw its masks and shard it.

        Args:
            model: The model of the plan, the same on every rank; changed in place.
            train: Tokens to learn, int64, shape (n,).
            plan: What every parameter gets.

        Returns:
            The run at its first step.
        """
        settings = self.settings
        masks = apply_(model, plan, seed=settings.seed, masks=law_of(settings.masks))
        masks.verify()  # the first forward pass would look for weights where there are slices
        work = partial(workload_of, model, accumulate=1, moments=1 if settings.optimizer == "sgd" else 2)
        cut, why = chosen(settings, self.mesh, work, partial(self._micro, model, train))
        self.engine = shard_(
            model,
            cut,
            self.mesh,
            optimizer=factory_for(settings),
            groups=groups_for(settings, model, masks.plan),
            clip=settings.clip or None,
            loss_scale=1.0,  # a step whose gradients are not finite is then left out
        )
        self.record.add("sharding", plan=cut.name, known_as=cut.known_as, why=why, **shape_of(self.mesh))
        model.train()
        return Course(model, settings, train, masks.plan, masks, self.engine.optimizer, None, density=live_share(masks))

    def _micro(self, model: nn.Module, train: Tensor) -> MicroStep:
        """The largest share of a batch, to be timed."""
        count, draw = math.ceil(self.settings.batch / self.mesh.world), stream(self.settings.seed, "batch", 0)
        rows = crops(train, batch=count, context=self.settings.context, generator=draw)
        inputs, targets = (part.to(device_of(model)) for part in rows)
        return MicroStep(model=model, loss=lambda: summed_loss(model, inputs, targets))

    def take_step_(self, course: Course) -> dict[str, Any]:
        """One optimizer step of all ranks.

        Args:
            course: The run; one step further afterwards.

        Returns:
            A row of the table "train", the same on every rank but for the seconds.

        Raises:
            DivergedError: If loss or gradient are not finite; weights and optimizer are then as before the step.
        """
        begin = time.perf_counter()
        lr, value = set_rates_(course), summed(self.mesh, self._gradients_(course))[0] / course.tokens
        norm = self.engine.step(divisor=course.tokens if math.isfinite(value) else math.nan)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise DivergedError(f"step {course.step + 1}: loss {value}, gradient norm {norm}, learning rate {lr:g}")
        course.step += 1
        course.seconds += time.perf_counter() - begin
        return {"step": course.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": course.seconds}

    def _gradients_(self, course: Course) -> float:
        """Run my share of a batch; returns the sum of its losses."""
        inputs, targets = batch_of(course, course.step)
        (mine,) = share(torch.arange(len(inputs))[None], self.mesh.rank, self.mesh.world)
        if not len(mine):  # of no rows the loss is 0, but it takes part in what the ranks send each other
            mine, targets = torch.zeros(1, dtype=torch.int64), torch.full_like(targets, IGNORED)
        own = () if self.mesh.world == 1 else (self.mesh.rank,)
        with seeded(self.settings.seed, "step", course.step, *own, device=device_of(course.model)):
            loss = summed_loss(course.model, inputs[mine], targets[mine])
            self.engine.backward(loss)
        return loss.item()

    def walk(self, course: Course, record: Record, validation: Part, *, after: Callable[[Course], None]) -> None:
        """Walk the run to its end; rank 0 shows how far it is.

        Args:
            course: The run.
            record: Receives the rows of ``advance_``.
            validation: Text to measure on.
            after: Called after every step.
        """
        label, how = "" if self.mesh.rank else "pretrain", partial(held_out_loss, self.mesh)
        advance_(course, record, validation, after=after, label=label, take=self.take_step_, loss_of=how)
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
        return save(self.engine, folder, course.step, own | {"seconds": course.seconds, "rows": record.rows})

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
        course.step, course.seconds, course.density = step_of(path), tree["seconds"], live_share(course.masks)
        return tree


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token loss of some rows.

    Args:
        model: A causal language model whose output has ``logits`` of shape (batch, length, vocabulary).
        inputs: Token ids, int64, shape (batch, length).
        targets: The token after each, −100 where none counts, int64, shape (batch, length).

    Returns:
        In nats, shape ().
    """
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
