"""What users do with a sharded model, under every plan, on our engine and on torch's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from idioms.table import Cell
from oracles.idiom_ranks import CORNERS, FSDP2, Idiom, cells
from oracles.idioms_of_training import training
from oracles.optimizers import Distance, GlobalNorm
from sparing.sharding import effective

PLANS = [plan.name for plan in effective()]
EVERY = bool(os.environ.get("SPARING_EVERY_PLAN"))
"""Whether every idiom is tried under all plans on both engines, which takes a quarter of an hour."""
SUBJECTS = [*PLANS, *(plan + FSDP2 for plan in (PLANS if EVERY else (*CORNERS, "NIG", "GIG")))]
"""Plans on our engine, and some on torch's: ``sharding/fsdp/test_plans.py`` has all of them there."""


def idioms() -> dict[str, Idiom]:
    """By name; made anew in every process of the test."""
    return {name: replace(idiom, under=None) if EVERY else idiom for name, idiom in training().items()}


IDIOMS = idioms()
TRIED = cells(IDIOMS, SUBJECTS)
TRAINING = tuple(
    Cell(idiom, subject, "equal" if IDIOMS[idiom].words(subject) is None else "refused")
    for idiom, subject in TRIED
    if IDIOMS[idiom].torch_says(subject) is None
)
THEIRS = [(idiom, subject) for idiom, subject in TRIED if IDIOMS[idiom].torch_says(subject) is not None]
"""What torch itself refuses on its engine: no cells."""
SETTINGS: dict[Cell, dict[str, Any]] = {
    Cell("an optimizer that looks across parameters", "norm of all gradients", "refused"): {"optimizer": GlobalNorm},
    Cell("an optimizer that looks across parameters", "norm beyond a hundred",
        "refused"): {"optimizer": partial(GlobalNorm, limit=100.0)},
    Cell("an optimizer that looks across parameters", "Prodigy", "refused"): {"optimizer": Distance},
    Cell("an optimizer that looks across parameters", "Prodigy, slow", "refused"): {"optimizer": partial(Distance,
        lr=0.1, start=1e-8)},
    Cell("an optimizer that looks across parameters", "Muon", "refused"): {"optimizer": torch.optim.Muon},
    Cell("an optimizer that looks across parameters", "Adafactor", "refused"): {"optimizer": torch.optim.Adafactor},
    Cell("gradients in a format without sums", "int8", "refused"): {"reduce_dtype": torch.int8},
    Cell("gradients in a format without sums", "bool", "refused"): {"reduce_dtype": torch.bool},
    Cell("gradients in a format without sums", "float8", "refused"): {"reduce_dtype": torch.float8_e4m3fn},
    Cell("weights in a format that cannot train", "int8", "refused"): {"dtype": torch.int8},
    Cell("weights in a format that cannot train", "complex64", "refused"): {"dtype": torch.complex64},
}  # fmt: skip
"""What is refused -> the setting of ``shard_`` that says so."""

CELLS = (*TRAINING, *SETTINGS)
