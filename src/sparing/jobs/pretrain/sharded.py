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
from sparing.jobs.pretrain.inputs import Part, crops
from sparing.jobs.pretrain.loop import advance_
from sparing.jobs.pretrain.optimizers import factory_for, groups_for
from sparing.jobs.pretrain.outputs import folder_of
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.state import TrainState, live_share
from sparing.jobs.pretrain.step import batch_of, set_rates_
from sparing.jobs.sharded import chosen, note_traffic, save, shape_of, share, step_of, summed, workload_of
from sparing.jobs.step import DivergedError
from sparing.report import Record
from sparing.scaling.apply import apply_
from sparing.scaling.planning import Plan
from sparing.seeds import stream
from sparing.sharding import checkpoint
from sparing.sharding.apply import shard_
from sparing.sharding.engine import Engine
from sparing.sharding.mesh import Mesh
from sparing.sharding.step_timing import MicroStep


@dataclass(slots=True)
class ShardedRun:
    """What a rank needs to take part in a run."""

    mesh: Mesh
    settings: Pretrain
    record: Record  # receives the tables "sharding" and "traffic"
    engine: Engine = field(init=False)  # made with the model, by ``start``

    def start(self, model: nn.Module, train: Tensor, plan: Plan) -> TrainState:
        """Scale a fresh model (the same on every rank), draw its masks and shard it."""
        settings = self.settings
        masks = apply_(model, plan, seed=settings.seed, masks=law_of(settings.masks))
        masks.verify()  # now: once sharded, the first forward pass would find slices in the place of weights
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
        return TrainState(
            model, settings, train, masks.plan, masks, self.engine.optimizer, None, density=live_share(masks)
        )

    def _micro(self, model: nn.Module, train: Tensor) -> MicroStep:
        """The largest share of a batch, to be timed."""
        count, draw = math.ceil(self.settings.batch / self.mesh.world), stream(self.settings.seed, "batch", 0)
        rows = crops(train, batch=count, context=self.settings.context, generator=draw)
        inputs, targets = (part.to(device_of(model)) for part in rows)
        return MicroStep(model=model, loss=lambda: summed_loss(model, inputs, targets))

    def take_step_(self, state: TrainState) -> dict[str, Any]:
        """One optimizer step of all ranks; returns the same row on every rank but for the seconds."""
        start = time.perf_counter()
        lr, value = set_rates_(state), summed(self.mesh, self._gradients_(state))[0] / state.tokens
        # A divisor that is not finite makes the engine skip the step on every rank.
        norm = self.engine.step(divisor=state.tokens if math.isfinite(value) else math.nan)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise DivergedError(f"step {state.step + 1}: loss {value}, gradient norm {norm}, learning rate {lr:g}")
        state.step += 1
        state.seconds += time.perf_counter() - start
        return {"step": state.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": state.seconds}

    def _gradients_(self, state: TrainState) -> float:
        """Run my share of a batch; returns the sum of its losses."""
        inputs, targets = batch_of(state, state.step)
        (mine,) = share(torch.arange(len(inputs))[None], self.mesh.rank, self.mesh.world)
        if not len(mine):  # of no rows the loss is 0, but it takes part in what the ranks send each other
            mine, targets = torch.zeros(1, dtype=torch.int64), torch.full_like(targets, IGNORED)
        # One rank draws the dropout of a run without ranks, so that both train alike.
        own = () if self.mesh.world == 1 else (self.mesh.rank,)
        with seeded(self.settings.seed, "step", state.step, *own, device=device_of(state.model)):
            loss = summed_loss(state.model, inputs[mine], targets[mine])
            self.engine.backward(loss)
        return loss.item()

    def walk(self, state: TrainState, record: Record, validation: Part, *, after: Callable[[TrainState], None]) -> None:
        """Train to the end; rank 0 shows progress."""
        label, how = "" if self.mesh.rank else "pretrain", partial(held_out_loss, self.mesh)
        advance_(state, record, validation, after=after, label=label, take=self.take_step_, loss_of=how)
        note_traffic(self.mesh, record)

    def save(self, folder: Folder, state: TrainState, record: Record) -> Path:
        """Write a checkpoint; returns its directory."""
        own = {"run": folder.whose(), "step": state.step}
        return save(self.engine, folder, state.step, own | {"seconds": state.seconds, "rows": record.rows})

    def restore_(self, state: TrainState, path: Path) -> Mapping[str, Any]:
        """Resume from a checkpoint, on these ranks and under this plan."""
        tree = checkpoint.load_(self.engine, path)
        folder_of(self.settings).check_own(path, tree)
        state.step, state.seconds, state.density = step_of(path), tree["seconds"], live_share(state.masks)
        return tree


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token loss in nats, shape (); targets −100 where none counts."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
