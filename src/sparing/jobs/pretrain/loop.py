"""The training loop: steps, measured as they go, and what is noted of masks and rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from sparing.jobs.lm.losses import Measure, held_out_loss, refuse_spoilt
from sparing.jobs.pretrain.course import Course
from sparing.jobs.pretrain.evaluate import measured
from sparing.jobs.pretrain.material import Part
from sparing.jobs.pretrain.step import take_step_
from sparing.jobs.step import DivergedError
from sparing.report import Progress, Record

# Units of the columns that a run adds.
UNITS = {
    "loss": "nat/token",
    "sent": "B",
    "bits_per_byte": "bit/B",
    "seconds": "s",
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
}


def measure_(course: Course, record: Record, part: Part, loss_of: Measure = held_out_loss) -> None:
    """Add a row to the table "held_out"."""
    row = measured(course.model, part, batch=course.settings.batch, loss_of=loss_of)
    record.add("held_out", step=course.step, **row, seconds=course.seconds)
    refuse_spoilt(course.step, row["loss"], "validation text")


def note_masks_(course: Course, record: Record) -> None:
    """Add the density to the table "density" whenever masks changed."""
    if course.evolution is None:
        return
    rows, digest = record.table("density"), course.masks.digest()
    if not rows or rows[-1]["masks"] != digest:
        dead = sum(outputs for outputs, _ in course.masks.dead.values())
        record.add("density", step=course.step, density=course.density, dead_neurons=dead, masks=digest)


def due(course: Course, every: int) -> bool:
    """Whether something that happens every so many steps (0: never), and at the end, is due now."""
    return course.step == course.settings.steps or bool(every and course.step % every == 0)


def advance_(
    course: Course,
    record: Record,
    validation: Part,
    *,
    after: Callable[[Course], None],
    label: str = "pretrain",
    take: Callable[[Course], dict[str, Any]] = take_step_,
    loss_of: Measure = held_out_loss,
) -> None:
    """Train to the end from the first step or a restored one.

    ``after`` is called after every step: it may save, or raise to stop.
    """
    settings = course.settings
    if course.step == 0:
        measure_(course, record, validation, loss_of)
        note_masks_(course, record)
    with _bar(course, label) as bar:
        while course.step < settings.steps:
            try:
                row = take(course)
            except DivergedError:
                refuse_spoilt(
                    course.step, loss_of(course.model, validation.rows, batch=settings.batch)[0], "validation text"
                )
                raise
            record.add("train", **row)
            if course.step % settings.every == 0 or course.step == settings.steps:
                note_masks_(course, record)
            if due(course, settings.eval_every):
                measure_(course, record, validation, loss_of)
            if bar:
                bar.advance(loss=row["loss"], lr=f"{row['lr']:.1e}", **_pace(course))
            after(course)
    _note_speed(course, record)


def _bar(course: Course, label: str) -> Any:
    steps = course.settings.steps
    return Progress(label, total=steps, resume_at=course.step) if label else contextlib.nullcontext()


def _pace(course: Course) -> dict[str, Any]:
    rate = f"{course.step * course.tokens / course.seconds:,.0f}"
    return {"tokens_per_s": rate} | ({} if course.evolution is None else {"density": f"{course.density:.3g}"})


def _note_speed(course: Course, record: Record) -> None:
    if not record.table("speed"):
        seconds = course.seconds / course.step
        rate = {"tokens_per_second": course.tokens / seconds, "step_seconds": seconds}
        record.add("speed", backend=course.settings.backend, **rate, seconds=course.seconds)
