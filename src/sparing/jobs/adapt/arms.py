"""The rivals: which hypergradient each takes, through how many documents, in which space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.reverse import Reverse
from sparing.jobs.adapt.settings import Adapt, Name
from sparing.report import plots

CAMELS = 6  # what CaMeLS unrolls in reverse, all that its memory allowed (count)

LABELS: dict[str, str] = {
    "base": "no adapting",
    "uniform": "uniform weights",
    "rgu": f"RGU, {CAMELS} documents",
    "fg-phi": "(FG)²U in φ",
    "fg-psi": "(FG)²U in ψ",
    "checkpointed": "checkpointed reverse",
}

ROLES: dict[str, plots.Role] = {
    "base": "baseline",
    "uniform": "second_rival",
    "rgu": "rival",
    "fg-phi": "ours",
    "fg-psi": "extension",
    "checkpointed": "reference",
}
"""Colour of each: blue is the paper's method, sky our extension of it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn the weights."""

    name: str
    method: Any  # of the hypergradient; None learns nothing
    documents: int  # depth of its windows (count)
    bottleneck: bool  # whether the run sees φ through ψ


def arm_of(name: Name, settings: Adapt) -> Arm:
    """The arm of a method. RGU is plain reverse over windows of 6 documents, as CaMeLS trains, not truncated over T."""
    depth, sampled = settings.documents, ForwardGradient(directions=settings.directions)
    arms: Sequence[Arm] = (
        Arm("uniform", None, depth, bottleneck=True),
        Arm("rgu", Reverse(), min(CAMELS, depth), bottleneck=True),
        Arm("fg-phi", sampled, depth, bottleneck=False),
        Arm("fg-psi", sampled, depth, bottleneck=True),
        Arm("checkpointed", Checkpointed(), depth, bottleneck=True),
    )
    return next(found for found in arms if found.name == name)
