"""Fine-tuning over several ranks: an engine in place of the optimizer, and layer sampling by the blocks of that engine.

Every rank runs the same loop on its share of the rows. What it learns follows from the rows of a step and the draws
alone, so any plan on any number of ranks ends where one process does, up to rounding; dropout differs by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.finetune.prices import step_of, try_predict
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import groups_for, rows_of
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.optimizer import adamw
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.step import FitStep
from sparing.jobs.ranks import Ranks, micro_steps
from sparing.jobs.settings import Parallel
from sparing.jobs.sharded import ShardedStepper, choose_plan, shard_model_, workload_of
from sparing.layersample import LayerSampling
from sparing.layersample.checks import check_blocks
from sparing.layersample.masters import HALVES
from sparing.layersample.parts import parts_of
from sparing.layersample.rates import ScaledRate, warmup_factor
from sparing.memory import Bytes
from sparing.report import Record
from sparing.sharding.engine.engine import Engine
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.network.step_timing import MicroStep
from sparing.sharding.planner.config import Workload


class ShardedSampler:
    """Layer sampling over an engine, with the part of ``Sampler``'s interface that the loop uses.

    Draws follow from the seed alone, so all ranks draw the same; a block that freezes loses its optimizer state.
    """

    def __init__(self, engine: Engine | FsdpEngine, settings: LayerSampling, seed: int) -> None:
        """Freeze what never trains and all middle blocks; the first draw unfreezes some."""
        self.engine, self.settings, self.seed = engine, settings, seed
        blocks, _ = parts_of(engine.model, settings.body)
        self.body = tuple(block.name for block in blocks if block.role == "body")
        self.interval: int | None = None  # None before the first ``begin_step``
        self.active: tuple[int, ...] = ()  # middle blocks that train now, sorted indices
        self.step = 0
        engine.freeze([name for name in frozen_blocks(blocks, settings) if name not in self.body])
        warmup = lambda: warmup_factor(self.step % settings.period, settings.warmup)  # noqa: E731
        self._rate = ScaledRate(engine.optimizer, warmup) if settings.warmup else None

    def begin_step(self, step: int) -> None:
        """Unfreeze the blocks that train in a step (from 0)."""
        self.step, interval = step, step // self.settings.period
        if interval == self.interval:
            return
        self._draw(interval)
        # Freeze before unfreezing: memory of the old blocks is free when the new ones ask for theirs.
        self.engine.freeze([name for at, name in enumerate(self.body) if at not in self.active])
        self.engine.thaw([self.body[at] for at in self.active])
        if self.settings.state == "reset_all":
            self.engine.optimizer.state.clear()

    def _draw(self, interval: int) -> None:
        self.interval, count = interval, self.settings.active
        self.active = self.settings.sampler.draw(len(self.body), count, seed=self.seed, interval=interval)

    def state_dict(self, *, optimizer: bool) -> dict[str, Any]:
        """Where the draws are; which blocks train, and their optimizer state, is with the engine's slices."""
        del optimizer
        return {"interval": self.interval}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the interval of ``state_dict``, whose blocks train already."""
        if state["interval"] is not None:
            self._draw(state["interval"])

    def close(self) -> None:
        """Take the hooks off."""
        if self._rate is not None:
            self._rate.close()


def frozen_blocks(blocks: Any, settings: LayerSampling, drawn: tuple[int, ...] = ()) -> list[str]:
    """Names of the blocks that do not train; ``drawn`` are indices of middle blocks that do."""
    on = {"embed": settings.embed, "tail": settings.tail, "head": settings.head}
    return [b.name for b in blocks if not (b.index in drawn if b.role == "body" else on[b.role])]


def freeze_unsampled_(model: nn.Module, method: LayerSampling, seed: int) -> list[str]:
    """Freeze what no draw trains (``start`` restores the flags); names of the blocks that do not train at first.

    Layer sampling that depends on more than its seed, or keeps state of frozen blocks, is refused.
    """
    blind, name = not getattr(method.sampler, "needs_scores", False), type(method.sampler).__name__
    why, do = (
        "it draws by gradients, of which every rank has a part only",
        "pass uniform, reshuffle or fixed",
    )
    require(blind, "lisa.sampler", name, why, do)
    why, do = "the slices of a frozen block are freed on all ranks", "pass reset or reset_all"
    require(method.state in {"reset", "reset_all"}, "lisa.state", method.state, why, do)
    blocks, never = parts_of(model, method.body)
    check_blocks(model, blocks, method)
    for name in never:
        named_parameters(model)[name].requires_grad_(False)
    count = sum(block.role == "body" for block in blocks)
    return frozen_blocks(blocks, method, method.sampler.draw(count, method.active, seed=seed, interval=0))


def _predict(model: nn.Module, training: Training, data: Packed, record: Record) -> Bytes | None:
    what = "activations, which are not counted in the choice of the plan"
    return try_predict(model, _whole(training), data, record, what)


def _whole(training: Training) -> Training:
    """All logits are there at once: slices of a head are gathered once a pass."""
    return replace(training, loss_tokens=0)


def _note_step(record: Record, step: FitStep) -> None:
    """Add the table "step"; an engine keeps 32-bit copies of all 16-bit weights."""
    record.add("step", **replace(step, masters=step.torch_dtype in HALVES).describe())


def shard_model(
    parallel: Parallel, data: Packed, ranks: Ranks, record: Record, model: nn.Module, training: Training
) -> tuple[ShardedStepper, ShardedSampler | None]:
    """Shard a model, by a plan that is chosen for these rows; the record gets the table "sharding"."""
    assert ranks.mesh is not None
    sampled = training.method if isinstance(training.method, LayerSampling) else None
    resting = [] if sampled is None else freeze_unsampled_(model, sampled, training.seed)
    body = None if sampled is None else sampled.body
    accumulate = micro_steps(training.accumulate, ranks.world)

    def work() -> Workload:
        """What a step asks of memory and network, with the blocks of the first interval."""
        price = None if parallel.memory is None else _predict(model, training, data, record)
        seen = price.activations if price else 0
        return workload_of(model, accumulate=accumulate, body=body, resting=resting, activation_bytes=seen)

    def micro() -> MicroStep:
        """The largest micro-step of the first step, to be timed."""
        largest = torch.tensor_split(rows_of(0, data, training).flatten(), accumulate)[0]
        largest = torch.tensor_split(largest, ranks.world)[0]  # of rank 0, on every rank
        return MicroStep(model=model, loss=lambda: loss_sum(model, data, largest), frozen=resting, body=body)

    step = step_of(model, _whole(training), data)
    plan, why = choose_plan(parallel, ranks.mesh, work, micro)
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in groups_for(model, training)]
    stepper = shard_model_(
        parallel, model, plan, ranks.mesh, optimizer=partial(adamw, lr=training.peak), groups=groups,
        accumulate=accumulate, clip=training.clip or None, body=body, local=parallel.local.steps(),
        # a step whose gradients are not finite is then left out
        loss_scale=1.0,
    )  # fmt: skip
    stepper.note_plan(record, plan, why)
    _note_step(record, replace(step, plan=plan.name, ranks=ranks.world))
    return stepper, None if sampled is None else ShardedSampler(stepper.engine, sampled, training.seed)
