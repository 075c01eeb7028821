"""The ways to fine-tune that a plan compares, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparing.jobs.plan.settings import Settings, share_of
from sparing.layersample import LayerSampling
from sparing.layersample.activations import LoRA
from sparing.layersample.predict import Full, Method


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to fine-tune."""

    label: str
    method: Method
    checkpointing: bool  # whether blocks recompute their activations
    share: float = 1.0  # share of every block that trains, of what the method trains; on a cluster only

    @property
    def name(self) -> str:
        """Label, and checkpointing if there is."""
        return self.label + (", checkpointing" if self.checkpointing else "")


def candidates(settings: Settings, *, layers: int, tied: bool) -> Iterator[Candidate]:
    """Every way to compare, full fine-tuning first, each without and with activation checkpointing.

    ``tied``: head and embedding share weights, so they freeze together.
    """
    for label, method, share in _methods(settings, layers, tied):
        for checkpointing in (False, True):
            yield Candidate(label=label, method=method, checkpointing=checkpointing, share=share)


def _methods(settings: Settings, layers: int, tied: bool) -> Iterator[tuple[str, Method, float]]:
    if settings.trainable is not None:
        yield f"{settings.trainable} of each block", Full(), share_of(settings.trainable)
        return
    yield "full", Full(), 1.0
    frozen = "embedding and head frozen" if tied else "embedding frozen"
    for active in settings.active:
        if active > layers:
            continue
        for embed in (True, False):
            label = f"LISA, {active} blocks" + ("" if embed else f", {frozen}")
            yield (
                label,
                LayerSampling(
                    active=active, period=settings.period, masters=settings.masters, embed=embed, head=embed or not tied
                ),
                1.0,
            )
    for rank in settings.ranks:
        adapters = LoRA(rank=rank, float_adapters=settings.dtype != "float32")  # as peft makes them
        yield f"LoRA, rank {rank}", adapters, 1.0
