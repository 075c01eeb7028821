"""The training loop: windows of micro-batches, one AdamW step each, measured as it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from sparing.errors import UserError
from sparing.jobs.finetune.batches import window
from sparing.jobs.finetune.prices import note_predicted, watched_step_
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, start
from sparing.jobs.finetune.step import take_step_
from sparing.jobs.lm.losses import Measure, held_out_loss, perplexity, refuse_spoilt
from sparing.jobs.lm.packing import Packed
from sparing.jobs.step import DivergedError
from sparing.report import Progress, Record

# Units of the columns that ``fit`` adds.
UNITS = {
    "loss": "nat/token",
    "sent": "B",
    "seconds": "s",
    "predicted": "B",
    "measured": "B",
    "tokens_per_second": "tokens/s",
    "step_seconds": "s",
}


def measure_(state: TrainState, record: Record, held_out: Packed | None, loss_of: Measure = held_out_loss) -> None:
    """Add a row to the table "held_out", if there is something to measure on."""
    if held_out is None:
        return
    loss, tokens = loss_of(state.model, held_out, batch=state.training.batch)
    row = {"step": state.step, "loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
    record.add("held_out", **row, seconds=state.seconds)
    refuse_spoilt(state.step, loss, "held-out rows")


def check_weights(state: TrainState, data: Packed, loss_of: Measure = held_out_loss) -> None:
    """Check the weights that the last step left, by the loss of the rows it trained on."""
    # A step is applied when loss and gradient before it are finite; what it did shows in the next loss only, and after
    # the last step there is none.
    pace = state.training
    if not state.step:
        return
    rows = window(state.step - 1, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
    loss, _ = loss_of(state.model, data.taken(rows.flatten()), batch=pace.batch)
    refuse_spoilt(state.step, loss, "rows it learnt from")


def is_done(state: TrainState) -> bool:
    """Whether the run has used its steps or its time."""
    limit = state.training.seconds
    return state.step >= state.steps or (limit is not None and state.seconds >= limit)


def _note_switches(record: Record) -> Callable[[TrainState], None]:
    """Return a function that records each new interval once, also when a run resumes inside one."""
    rows = record.table("switches")
    last = rows[-1]["interval"] if rows else None

    def note(state: TrainState) -> None:
        nonlocal last
        if state.sampler is not None and state.sampler.interval != last:
            last = state.sampler.interval
            blocks = " ".join(map(str, state.sampler.active))
            record.add("switches", interval=last, step=state.step, blocks=blocks)

    return note


def _bar(state: TrainState, label: str) -> Any:
    return Progress(label, total=state.steps, resume_at=state.step) if label else contextlib.nullcontext()


def advance_(
    state: TrainState,
    data: Packed,
    record: Record,
    *,
    held_out: Packed | None = None,
    label: str = "train",
    memory: bool = False,
    after: Callable[[TrainState], None] = lambda state: None,
    take: Callable[[TrainState, Packed], dict[str, Any]] | None = None,
    loss_of: Measure = held_out_loss,
) -> None:
    """Train to the end from the first step or a restored one.

    ``after`` is called after every step: it may save, or raise to stop.
    """
    every, note = state.training.evaluate_every, _note_switches(record)
    if state.step == 0:
        measure_(state, record, held_out, loss_of)
        if memory:
            note_predicted(state, data, record)
    with _bar(state, label) as bar:
        while not is_done(state):
            try:
                row = watched_step_(state, data, record) if memory else (take or take_step_)(state, data)
            except DivergedError:
                # If the step before spoilt the weights, that is the error to raise: they cannot be trained on.
                check_weights(state, data, loss_of)
                raise
            record.add("train", **row)
            note(state)
            if is_done(state) or (every and state.step % every == 0):
                measure_(state, record, held_out, loss_of)
            if bar:
                bar.advance(loss=row["loss"], tokens_per_s=f"{state.seen / state.seconds:,.0f}")
            after(state)
    if held_out is None:
        check_weights(state, data, loss_of)
    _note_speed(state, record)


def _note_speed(state: TrainState, record: Record) -> None:
    if not record.table("speed") and state.seconds:
        rates = {"tokens_per_second": state.seen / state.seconds, "step_seconds": state.seconds / state.step}
        record.add("speed", method=type(state.training.method).__name__, **rates)


def fit(
    model: nn.Module,
    data: Packed,
    training: Training,
    *,
    held_out: Packed | None = None,
    label: str = "train",
    memory: bool = False,
    record: Record | None = None,
) -> Record:
    """Train a live model on token rows: the same bits for the same model, data, settings and number of threads.

    LoRA leaves its adapters in the model. The record has the tables "train", "held_out", "switches", "memory", "speed".
    """
    if not data.tokens:
        raise UserError("data", got="0 labels", why="there is nothing to learn", do="pass rows with labels")
    if record is None:
        question = "How far does the held-out loss fall?"
        record = Record(question=question, settings=asdict(training), seed=training.seed, units=dict(UNITS))
    with start(model, training, rows=data.rows) as state:
        advance_(state, data, record, held_out=held_out, label=label, memory=memory)
    return record
