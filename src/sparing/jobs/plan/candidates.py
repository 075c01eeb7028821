"""The ways to fine-tune that a plan compares, each as the step that `finetune` would run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.models import config_of
from sparing.jobs.lm.optimizer import Apollo, GaLore, optimizer_of
from sparing.jobs.lm.step import FitStep
from sparing.jobs.plan.settings import Settings, share_of
from sparing.layersample import LayerSampling
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape

# How far evidence goes (docs/results/layers.md). Among those of a tier cost decides.
REFERENCE, STAND_IN, ADAPTERS, UNSETTLED, ROUNDED = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to fine-tune."""

    label: str
    step: FitStep
    share: float = 1.0  # share of every block that trains, of what the method trains; on a cluster only
    tier: int = UNSETTLED
    optimizer: str = "adamw"  # as `finetune --optimizer` calls it

    @property
    def method(self) -> Full | LayerSampling | LoRA:
        """What trains, as the formulas know it."""
        found = formula.closed(self.step.method, self.step)
        assert found is not None, "a plan offers adapters on every linear layer, without DoRA"
        return found

    @property
    def checkpointing(self) -> bool:
        """Whether blocks compute their activations again."""
        return self.step.checkpointing

    @property
    def name(self) -> str:
        """Label, and checkpointing if there is."""
        return self.label + (", checkpointing" if self.checkpointing else "")


def candidates(settings: Settings, source: Source) -> Iterator[Candidate]:
    """Every way to compare, full fine-tuning first, each without and with activation checkpointing."""
    if not source.causal:
        # rows of several documents are for causal language models
        settings = replace(settings, packing=False)
    if settings.place is None:
        # bytes of quantised layers are read off a model
        settings = replace(settings, weights=None)
    for way in _ways(settings, source.layers, source.tied):
        for checkpointing in (False, True):
            yield replace(way, step=replace(way.step, checkpointing=checkpointing))


def _ways(settings: Settings, layers: int, tied: bool) -> Iterator[Candidate]:
    step, alone = settings.step(Full()), settings.cluster is None
    if settings.trainable is not None:
        yield Candidate(label=f"{settings.trainable} of each block", step=step, share=share_of(settings.trainable))
        return
    yield Candidate(label="full", step=step, tier=REFERENCE)
    for word in settings.optimizers if alone else ():
        optimizer = optimizer_of(word, device=settings.device, apollo=Apollo(), galore=GaLore())
        tier = STAND_IN if word == "adamw-8bit" else UNSETTLED
        changed = replace(step, optimizer=optimizer)
        yield Candidate(label=f"full, {word}", step=changed, tier=tier, optimizer=word)
    for active in settings.lisa.active:
        if alone or active <= layers:
            yield from _lisa(settings, active, tied, alone)
    if alone and layers:
        yield Candidate(label="BAdam", step=settings.step(LayerSampling.badam(period=settings.lisa.period)))
    for rank in settings.lora.ranks:
        low = settings.step(Lora(rank=rank))
        yield Candidate(label=f"LoRA, rank {rank}", step=low, tier=ADAPTERS)
        if alone and settings.weights:
            stored = replace(low, weights=settings.weights)
            yield Candidate(label=f"QLoRA, {settings.weights}, rank {rank}", step=stored, tier=ROUNDED)


def _lisa(settings: Settings, active: int, tied: bool, alone: bool) -> Iterator[Candidate]:
    # tied, head and embedding share weights, so they freeze together
    frozen = "embedding and head frozen" if tied else "embedding frozen"
    for embed in (True, False):
        method = LayerSampling(
            active=active, period=settings.lisa.period, embed=embed, head=embed or not tied, masters=settings.masters
        )
        count = f"{active} block{'s' * (active > 1)}"
        label = f"LISA, {count}" + ("" if embed else f", {frozen}")
        yield Candidate(label=label, step=settings.step(method))
        if alone and settings.weights and not embed:
            stored = replace(settings.step(method), weights=settings.weights)
            yield Candidate(label=f"QLISA, {settings.weights}, {count}, {frozen}", step=stored, tier=ROUNDED)


# Blocks, width and inner width of LLaMA-like models: two small ones, TinyLlama, OpenLLaMA-3B, LLaMA-7B to 65B, and one
# of Llama-3.1-405B's blocks and width.
LADDER: Final = (
    (12, 768, 2048), (24, 1024, 2736), (22, 2048, 5632), (26, 3200, 8640), (32, 4096, 11008), (40, 5120, 13824),
    (60, 6656, 17920), (80, 8192, 22016), (126, 16384, 43690),
)  # fmt: skip

VOCABULARY: Final = 32000  # rows of their embeddings (count)


def shape_like(params: float) -> Shape:
    """The shape of a model of so many parameters: the nearest of ``LADDER``, its feed-forward width adjusted.

    Example:
        >>> shape = shape_like(65e9)
        >>> shape.layers, shape.width
        (80, 8192)
    """
    rungs = [
        Shape(layers=layers, width=width, ffn=ffn, heads=max(width // 128, 1), kv_heads=max(width // 128, 1),
              head_dim=128, vocab=VOCABULARY)
        for layers, width, ffn in LADDER
    ]  # fmt: skip
    # Depth and width of a real model; what is missing goes into the feed-forward part, three matrices a block.
    near = min(rungs, key=lambda rung: abs(math.log(rung.total / params)))
    missing = (params - near.total) / (3 * near.layers * near.width)
    return replace(near, ffn=max(round(near.ffn + missing), 1))


def read_config(settings: Settings) -> Any:
    """The transformers configuration of the model, or a shape for one known by its size alone."""
    if settings.place is None:
        return shape_like(settings.params or 0)
    return config_of(settings.place)
