"""Loops, optimizers and options of the Trainer: equal to what is written out by hand, or refused in a line."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from idioms.layersample.cells import LOOP_CELLS, OPTIMIZER_CELLS, REFUSAL_CELLS, TRAINER_CELLS
from idioms.layersample.families import FAMILIES
from idioms.layersample.interrupted import INTERRUPTED
from idioms.layersample.loops import LOOPS
from idioms.layersample.optimizers import OPTIMIZERS, REFUSED, difference
from idioms.layersample.refusals import REFUSALS
from idioms.layersample.trainer_options import TRAINERS
from idioms.layersample.trainers import SAMPLING, trainer
from idioms.layersample.trainers import difference as under_a_trainer
from idioms.table import Cell
from sparing.errors import UserError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing` is deprecated:FutureWarning"
)  # peft's own use

ROUNDING = 1e-13
"""Both sides do the same sums, the optimizer's in another order, in float64: a few units in the last place."""


@pytest.mark.parametrize("cell", LOOP_CELLS, ids=lambda cell: cell.name)
def test_the_weights_are_those_of_the_loop_by_hand(cell: Cell, tmp_path: Path) -> None:
    run = (LOOPS | INTERRUPTED)[cell.idiom, cell.subject]
    assert (run(tmp_path) if "out" in inspect.signature(run).parameters else run()) < ROUNDING


@pytest.mark.parametrize("cell", REFUSAL_CELLS, ids=lambda cell: cell.name)
def test_what_would_train_something_else_is_refused(cell: Cell) -> None:
    run, words = REFUSALS[cell.idiom, cell.subject]
    with pytest.raises(UserError, match=words) as caught:
        run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cell", OPTIMIZER_CELLS, ids=lambda cell: cell.name)
def test_an_optimizer_is_itself_with_flags_by_hand_or_refused(cell: Cell) -> None:
    """Equal to the bit: the same operations on the same numbers. "offload" moves state away and back."""
    policy = cell.idiom.split('"')[1]
    if cell.outcome == "refused":
        make, _, words = REFUSED[cell.subject]
        with pytest.raises(UserError, match=words):
            difference(make, policy)
    else:
        assert difference(OPTIMIZERS.get(cell.subject, torch.optim.Adagrad), policy) == 0


@pytest.mark.parametrize("cell", TRAINER_CELLS, ids=lambda cell: cell.name)
def test_options_of_the_trainer_change_nothing_of_what_was_drawn(cell: Cell, tmp_path: Path) -> None:
    changes, settings = TRAINERS[cell.idiom]
    assert under_a_trainer(trainer, FAMILIES["Llama"], tmp_path, settings or SAMPLING, **changes) < ROUNDING
