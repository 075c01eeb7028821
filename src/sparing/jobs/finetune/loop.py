"""The training loop: windows of micro-batches, one AdamW step each, measured as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from sparing.errors import UserError
from sparing.jobs.finetune.prices import note_predicted, watched_step_
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, rows_of, start, take_step_
from sparing.jobs.lm import page as lm
from sparing.jobs.lm.losses import held_out_loss, perplexity, refuse_spoilt
from sparing.jobs.lm.meta import loss_tokens
from sparing.jobs.lm.packing import Packed
from sparing.jobs.run import take_steps
from sparing.jobs.step import DivergedError
from sparing.report import Record

UNITS = lm.UNITS | {"predicted": "B", "measured": "B"}


Watch = Callable[[TrainState, str, Mapping[str, Any]], None]  # told of each row as it comes, and of its table


def measure_(state: TrainState, record: Record, held_out: Packed | None, watch: Sequence[Watch] = ()) -> None:
    """Add a row to the table "held_out", if there is something to measure on."""
    if held_out is None:
        return
    loss, tokens = _loss_on(state, held_out)
    row = {"step": state.step, "loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
    record.add("held_out", **row, seconds=state.seconds)
    refuse_spoilt(state.step, loss, "held-out rows")
    for told in watch:
        told(state, "held_out", row)


def _loss_on(state: TrainState, data: Packed) -> tuple[float, int]:
    """Mean loss in nats per label, and the number of labels."""
    return held_out_loss(state.model, data, batch=state.training.batch, ranks=state.ranks, at_once=state.at_once)


def check_weights(state: TrainState, data: Packed) -> None:
    """Check the weights that the last step left, by the loss of the rows it trained on."""
    # A step is applied when loss and gradient before it are finite; what it did shows in the next loss only, and after
    # the last step there is none.
    pace = state.training
    if not state.step:
        return
    rows = rows_of(state.step - 1, data, pace)
    loss, _ = _loss_on(state, data.taken(rows.flatten()))
    refuse_spoilt(state.step, loss, "rows it learnt from")


def is_done(state: TrainState) -> bool:
    """Whether the run has used its steps or its time."""
    limit = state.training.seconds
    return state.step >= state.steps or (limit is not None and state.seconds >= limit)


def finish_(state: TrainState) -> bool:
    """Whether the run is done; all ranks then come to the same weights."""
    if done := is_done(state):
        state.stepper.finish_()
    return done


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


def _at_once(state: TrainState, data: Packed) -> int:
    """Tokens whose logits exist at once (count); 0: all."""
    pace = state.training
    # slices of a head are gathered once a pass, and the loss in parts would ask for them often
    return 0 if state.stepper.sharded else loss_tokens(state.model, pace.loss_tokens, pace.batch * data.length)


def train(
    state: TrainState,
    data: Packed,
    record: Record,
    *,
    held_out: Packed | None = None,
    memory: bool = False,
    steps: Callable[..., None] = take_steps,
    watch: Sequence[Watch] = (),
    **how: Any,
) -> None:
    """Train to the end from the first step or a restored one, by ``steps`` as they are told ``how``."""
    every, note = state.training.evaluate_every, _note_switches(record)
    state.at_once = _at_once(state, data)
    if state.step == 0:
        measure_(state, record, held_out, watch)
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
        for told in watch:
            told(state, "train", row)
        note(state)
        if finish_(state) or (every and state.step % every == 0):
            measure_(state, record, held_out, watch)
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
