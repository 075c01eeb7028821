"""LISA over several ranks: its draws freeze and unfreeze blocks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparing.errors import require
from sparing.jobs.finetune.settings import Training
from sparing.layersample import LayerSampling
from sparing.layersample.parts import parts_of
from sparing.layersample.rates import warmup_factor
from sparing.sharding.engine import Engine


@dataclass(slots=True)
class Draws:
    """LISA over an engine, with the part of ``Sampler``'s interface that the loop uses; draws agree on all ranks."""

    engine: Engine
    settings: LayerSampling  # which blocks train, and for how long
    seed: int
    body: tuple[str, ...]
    interval: int | None = None  # index of the interval, None before the first ``begin_step``
    active: tuple[int, ...] = ()  # middle blocks that train now, sorted indices

    def begin_step(self, step: int) -> None:
        """Unfreeze the blocks that train in a step (from 0)."""
        if step // self.settings.period == self.interval:
            return
        self.resume_at_(step)
        # Freeze before unfreezing: memory of the old blocks is free when the new ones ask for theirs.
        self.engine.freeze([name for at, name in enumerate(self.body) if at not in self.active])
        self.engine.thaw([self.body[at] for at in self.active])
        if self.settings.state == "reset_all":
            self.engine.optimizer.state.clear()

    def resume_at_(self, step: int) -> None:
        """Take up a step (from 0) whose blocks train already, as after loading a checkpoint."""
        settings, self.interval = self.settings, step // self.settings.period
        self.active = settings.sampler.draw(len(self.body), settings.active, seed=self.seed, interval=self.interval)

    def factor(self, step: int) -> float:
        """Multiplier of the learning rate after a draw, in (0, 1]."""
        return warmup_factor(step % self.settings.period, self.settings.warmup) if self.settings.warmup else 1.0

    def close(self) -> None:
        """Do nothing: there are no hooks to remove."""


def draws_for(engine: Engine, settings: LayerSampling, seed: int) -> Draws:
    """Freeze what never trains and all middle blocks; the first draw unfreezes some."""
    blocks, _ = parts_of(engine.model, settings.body)
    body = tuple(block.name for block in blocks if block.role == "body")
    engine.freeze([name for name in frozen_blocks(blocks, settings) if name not in body])
    return Draws(engine, settings, seed, body)


def frozen_blocks(blocks: Any, settings: LayerSampling, drawn: tuple[int, ...] = ()) -> list[str]:
    """Names of the blocks that do not train; ``drawn`` are indices of middle blocks that do."""
    on = {"embed": settings.embed, "tail": settings.tail, "head": settings.head}
    return [b.name for b in blocks if not (b.index in drawn if b.role == "body" else on[b.role])]


def check_method(method: LayerSampling) -> None:
    """Reject layer sampling that depends on more than its seed, or keeps state of frozen blocks."""
    blind, name = not getattr(method.sampler, "needs_scores", False), type(method.sampler).__name__
    why, do = "it draws by gradients, of which every rank has a part only", "pass uniform, reshuffle or fixed"
    require(blind, "lisa.sampler", name, why, do)
    why, do = "the slices of a frozen block are freed on all ranks", "pass reset or reset_all"
    require(method.state in {"reset", "reset_all"}, "lisa.state", method.state, why, do)


def first_interval(model: nn.Module, training: Training) -> tuple[str | Sequence[str] | None, list[str]]:
    """Where the body is, and the blocks that do not train at first."""
    method = training.method
    if not isinstance(method, LayerSampling):
        return None, []
    blocks, _ = parts_of(model, method.body)
    count = sum(block.role == "body" for block in blocks)
    drawn = method.sampler.draw(count, method.active, seed=training.seed, interval=0)
    return method.body, frozen_blocks(blocks, method, drawn)
