"""The training loop: windows of micro-batches, one AdamW step each, measured as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from sparing.errors import UserError
from sparing.jobs.finetune.prices import note_predicted, watched_step_
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, start, take_step_, window
from sparing.jobs.lm import page as lm
from sparing.jobs.lm.losses import held_out_loss, perplexity, refuse_spoilt
from sparing.jobs.lm.packing import Packed
from sparing.jobs.run import take_steps
from sparing.jobs.step import DivergedError
from sparing.report import Record

UNITS = lm.UNITS | {"predicted": "B", "measured": "B"}


def measure_(state: TrainState, record: Record, held_out: Packed | None) -> None:
    """Add a row to the table "held_out", if there is something to measure on."""
    if held_out is None:
        return
    loss, tokens = held_out_loss(state.model, held_out, batch=state.training.batch, ranks=state.ranks)
    row = {"step": state.step, "loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
    record.add("held_out", **row, seconds=state.seconds)
    refuse_spoilt(state.step, loss, "held-out rows")


def check_weights(state: TrainState, data: Packed) -> None:
    """Check the weights that the last step left, by the loss of the rows it trained on."""
    # A step is applied when loss and gradient before it are finite; what it did shows in the next loss only, and after
    # the last step there is none.
    pace = state.training
    if not state.step:
        return
    rows = window(state.step - 1, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
    loss, _ = held_out_loss(state.model, data.taken(rows.flatten()), batch=pace.batch, ranks=state.ranks)
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


def train(
    state: TrainState,
    data: Packed,
    record: Record,
    *,
    held_out: Packed | None = None,
    memory: bool = False,
    steps: Callable[..., None] = take_steps,
    **how: Any,
) -> None:
    """Train to the end from the first step or a restored one, by ``steps`` as they are told ``how``."""
    every, note = state.training.evaluate_every, _note_switches(record)
    if state.step == 0:
        measure_(state, record, held_out)
        if memory:
            note_predicted(state, data, record)

    def take_step() -> dict[str, Any]:
        try:
            row = watched_step_(state, data, record) if memory else take_step_(state, data)
        except DivergedError:
            # If the step before spoilt the weights, that is the error to raise: they cannot be trained on.
            check_weights(state, data)
            raise
        record.add("train", **row)
        note(state)
        if is_done(state) or (every and state.step % every == 0):
            measure_(state, record, held_out)
        return {"loss": row["loss"], "tokens_per_s": f"{state.seen / state.seconds:,.0f}"}

    steps(state, take_step, total=state.steps, until=lambda: is_done(state), **how)
    if held_out is None:
        check_weights(state, data)
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
        train(state, data, record, held_out=held_out, memory=memory, label=label, quiet=not label)
    return record
