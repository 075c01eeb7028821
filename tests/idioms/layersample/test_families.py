"""LISA in a plain loop, in Hugging Face's Trainer and in TRL's SFTTrainer, against a loop written out by hand."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from idioms.layersample.cells import FAMILY_CELLS, LOOPS
from idioms.layersample.families import FAMILIES
from idioms.layersample.reference import apart, train_by_hand_
from idioms.layersample.trainers import SAMPLING, difference, sft, trainer
from idioms.table import Cell
from sparing.layersample import Sampler

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own use

ROUNDING = 1e-13
"""Both sides do the same sums, the optimizer's in another order, in float64: a few units in the last place."""

TRAINERS = {"Trainer": trainer, "SFTTrainer": sft}


def in_a_plain_loop(name: str) -> float:
    family = FAMILIES[name]
    model = family.make()
    twin, windows = copy.deepcopy(model), [[family.batch(step)] for step in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    model.train(), twin.train()
    with Sampler(model, optimizer, SAMPLING) as sampler:
        for step, window in enumerate(windows):
            sampler.begin_step(step)
            model(**window[0]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    train_by_hand_(
        twin, family.lists, windows, loss=lambda m, x: m(**x).loss, decay=lambda name: 0.1, off=family.frozen
    )
    return apart(model, twin)


@pytest.mark.parametrize("cell", FAMILY_CELLS, ids=lambda cell: cell.name)
def test_what_trains_is_what_was_drawn(cell: Cell, tmp_path: Path) -> None:
    assert cell.idiom in LOOPS
    make = TRAINERS.get(cell.idiom)
    run = (
        partial(difference, make, FAMILIES[cell.subject], tmp_path) if make else partial(in_a_plain_loop, cell.subject)
    )
    assert run() < ROUNDING
