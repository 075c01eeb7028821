"""Fine-tuning over several ranks: the engine replaces the optimizer, draws replace the sampler.

Every rank runs the same loop on its share of the rows. What it learns follows from the rows of a step and the draws
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
from sparing.jobs.finetune.draws import Draws, check_method, draws_for, first_interval
from sparing.jobs.finetune.loop import advance_
from sparing.jobs.finetune.outputs import folder_of
from sparing.jobs.finetune.prices import activations
from sparing.jobs.finetune.settings import Finetune, Training
from sparing.jobs.finetune.state import TrainState, groups_for
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
class ShardedRun:
    """What a rank needs to take part in a run."""

    mesh: Mesh
    settings: Finetune
    data: Packed  # training rows, of which the choice of a plan looks at the shape
    record: Record  # receives the tables "sharding" and "traffic"
    engine: Engine = field(init=False)  # made with the model, by ``make_optimizer``

    def make_optimizer(self, model: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, Draws | None]:
        """Shard a model; returns the engine's optimizer, and draws for layer sampling."""
        method = training.method
        if isinstance(method, LayerSampling):
            check_method(method)
            blocks, frozen = parts_of(model, method.body)
            check_blocks(model, blocks, method)
            for name in frozen:  # ``start`` restores the flags
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
            # Activations do not depend on the optimizer, which exists only once the plan is chosen.
            probe = TrainState(model, training, 1, adamw([torch.zeros(1)]), None)
            seen = activations(probe, self.data, self.record)
        accumulate = micro_steps(training.accumulate, self.mesh.world)
        return workload_of(model, accumulate=accumulate, body=body, resting=rest, activation_bytes=seen)

    def _micro(self, model: nn.Module, training: Training) -> MicroStep:
        """The largest micro-step of the first step, to be timed."""
        rows = window(0, rows=self.data.rows, batch=training.batch, accumulate=training.accumulate, seed=training.seed)
        largest, (body, rest) = share(rows, 0, self.mesh.world)[0], first_interval(model, training)
        return MicroStep(model=model, loss=lambda: share_loss(model, self.data, largest), frozen=rest, body=body)

    def take_step_(self, state: TrainState, data: Packed) -> dict[str, Any]:
        """One optimizer step of all ranks; returns the same row on every rank but for the seconds."""
        begin, pace = time.perf_counter(), state.training
        lr = self._set_rate_(state)
        rows = window(state.step, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
        tokens = int((data.labels[rows.flatten()][:, 1:] != IGNORED).sum())
        mine = self._gradients_(state, data, rows)
        loss = summed(self.mesh, mine)[0] / tokens
        # A divisor that is not finite makes the engine skip the step on every rank.
        norm = self.engine.step(divisor=tokens if math.isfinite(loss) else math.nan)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"step {state.step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:g}")
        state.step += 1
        state.seen += rows.numel() * data.length
        state.seconds += time.perf_counter() - begin
        return {
            "step": state.step,
            "tokens": tokens,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "seconds": state.seconds,
        }

    def _set_rate_(self, state: TrainState) -> float:
        pace, factor = state.training, 1.0
        if isinstance(state.sampler, Draws):
            state.sampler.begin_step(state.step)
            factor = state.sampler.factor(state.step)
        lr = rate(state.step, peak=pace.peak, steps=state.steps, warmup=pace.warmup, schedule=pace.schedule)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * factor
        return lr

    def _gradients_(self, state: TrainState, data: Packed, rows: Tensor) -> float:
        """Run my share of a window; returns the sum of its losses."""
        pace, mesh, total = state.training, self.mesh, 0.0
        # One rank draws the dropout of a run without ranks, so that both train alike.
        own = () if mesh.world == 1 else (mesh.rank,)
        with seeded(pace.seed, "dropout", state.step, *own, device=device_of(state.model)):
            for micro in share(rows, mesh.rank, mesh.world):
                loss = share_loss(state.model, data, micro)
                self.engine.backward(loss)
                total += loss.item()
        return total

    def walk(
        self,
        state: TrainState,
        data: Packed,
        record: Record,
        *,
        held_out: Packed | None,
        after: Callable[[TrainState], None],
    ) -> None:
        """Train to the end; rank 0 shows progress."""
        label = "" if self.mesh.rank else "fine-tune"
        how: dict[str, Any] = {"take": self.take_step_, "loss_of": partial(held_out_loss, self.mesh)}
        advance_(state, data, record, held_out=held_out, label=label, after=after, **how)
        note_traffic(self.mesh, record)

    def save(self, folder: Folder, state: TrainState, record: Record) -> Path:
        """Write a checkpoint; returns its directory."""
        own = {"run": folder.whose(), "step": state.step}
        tree = own | {"seconds": state.seconds, "seen": state.seen, "rows": record.rows}
        return save(self.engine, folder, state.step, tree)

    def restore_(self, state: TrainState, path: Path) -> Mapping[str, Any]:
        """Resume from a checkpoint, on these ranks and under this plan."""
        tree = checkpoint.load_(self.engine, path)
        folder_of(self.settings).check_own(path, tree)
        state.step, state.seconds, state.seen = step_of(path), tree["seconds"], tree["seen"]
        if isinstance(state.sampler, Draws) and state.step:
            state.sampler.resume_at_(state.step - 1)
        return tree
