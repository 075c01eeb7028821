"""The training loop: windows of micro-batches, one AdamW step each, measured as it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from sparing.errors import UserError
from sparing.jobs.finetune.batches import window
from sparing.jobs.finetune.course import Course, begun
from sparing.jobs.finetune.prices import note_predicted, watched_step_
from sparing.jobs.finetune.settings import Training
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


def measure_(course: Course, record: Record, held_out: Packed | None, loss_of: Measure = held_out_loss) -> None:
    """Add a row to the table "held_out", if there is something to measure on."""
    if held_out is None:
        return
    loss, tokens = loss_of(course.model, held_out, batch=course.training.batch)
    row = {"step": course.step, "loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
    record.add("held_out", **row, seconds=course.seconds)
    refuse_spoilt(course.step, loss, "held-out rows")


def check_weights(course: Course, data: Packed, loss_of: Measure = held_out_loss) -> None:
    """Check the weights that the last step left, by the loss of the rows it trained on."""
    pace = course.training
    if not course.step:
        return
    rows = window(course.step - 1, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
    loss, _ = loss_of(course.model, data.taken(rows.flatten()), batch=pace.batch)
    refuse_spoilt(course.step, loss, "rows it learnt from")


def ended(course: Course) -> bool:
    """Whether the run has used its steps or its time."""
    limit = course.training.seconds
    return course.step >= course.steps or (limit is not None and course.seconds >= limit)


def _note_switches(record: Record) -> Callable[[Course], None]:
    """A function that notes each new interval once, also when the run is resumed inside one."""
    rows = record.table("switches")
    last = rows[-1]["interval"] if rows else None

    def note(course: Course) -> None:
        nonlocal last
        if course.sampler is not None and course.sampler.interval != last:
            last = course.sampler.interval
            blocks = " ".join(map(str, course.sampler.active))
            record.add("switches", interval=last, step=course.step, blocks=blocks)

    return note


def _bar(course: Course, label: str) -> Any:
    return Progress(label, total=course.steps, resume_at=course.step) if label else contextlib.nullcontext()


def advance_(
    course: Course,
    data: Packed,
    record: Record,
    *,
    held_out: Packed | None = None,
    label: str = "train",
    memory: bool = False,
    after: Callable[[Course], None] = lambda course: None,
    take: Callable[[Course, Packed], dict[str, Any]] | None = None,
    loss_of: Measure = held_out_loss,
) -> None:
    """Train to the end from the first step or a restored one.

    ``after`` is called after every step: it may save, or raise to stop.
    """
    every, note = course.training.evaluate_every, _note_switches(record)
    if course.step == 0:
        measure_(course, record, held_out, loss_of)
        if memory:
            note_predicted(course, data, record)
    with _bar(course, label) as bar:
        while not ended(course):
            try:
                row = watched_step_(course, data, record) if memory else (take or take_step_)(course, data)
            except DivergedError:
                check_weights(course, data, loss_of)
                raise
            record.add("train", **row)
            note(course)
            if ended(course) or (every and course.step % every == 0):
                measure_(course, record, held_out, loss_of)
            if bar:
                bar.advance(loss=row["loss"], tokens_per_s=f"{course.seen / course.seconds:,.0f}")
            after(course)
    if held_out is None:
        check_weights(course, data, loss_of)
    _note_speed(course, record)


def _note_speed(course: Course, record: Record) -> None:
    if not record.table("speed") and course.seconds:
        rates = {"tokens_per_second": course.seen / course.seconds, "step_seconds": course.seconds / course.step}
        record.add("speed", method=type(course.training.method).__name__, **rates)


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
    with begun(model, training, rows=data.rows) as course:
        advance_(course, data, record, held_out=held_out, label=label, memory=memory)
    return record
