"""The ways to fine-tune that a plan compares, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling
from sparing.layersample.activations import LoRA
from sparing.layersample.predict import Full, Method


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to fine-tune."""

    label: str
    """Name in every table."""
    method: Method
    """What trains."""
    checkpointing: bool
    """Whether blocks recompute their activations."""


def candidates(settings: Settings, *, layers: int, tied: bool) -> Iterator[Candidate]:
    """Every way to compare, each without and with activation checkpointing.

    Args:
        settings: Which numbers of blocks and ranks.
        layers: Body blocks of the model (count); LISA with more is left out.
        tied: Whether head and embedding share weights, so that they freeze together.

    Yields:
        Candidates, full fine-tuning first.
    """
    for label, method in _methods(settings, layers, tied):
        for checkpointing in (False, True):
            yield Candidate(label=label, method=method, checkpointing=checkpointing)


def _methods(settings: Settings, layers: int, tied: bool) -> Iterator[tuple[str, Method]]:
    yield "full", Full()
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
            )
    for rank in settings.ranks:
        yield f"LoRA, rank {rank}", LoRA(rank=rank, float_adapters=settings.dtype != "float32")  # as peft makes them
