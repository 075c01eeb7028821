"""The training loop: steps, measured as they go, and what is noted of masks and rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from sparing.jobs.lm.losses import Measure, held_out_loss, refuse_spoilt
from sparing.jobs.pretrain.evaluate import evaluate
from sparing.jobs.pretrain.inputs import Part
from sparing.jobs.pretrain.state import TrainState
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


def measure_(state: TrainState, record: Record, part: Part, loss_of: Measure = held_out_loss) -> None:
    """Add a row to the table "held_out"."""
    row = evaluate(state.model, part, batch=state.settings.batch, loss_of=loss_of)
    record.add("held_out", step=state.step, **row, seconds=state.seconds)
    refuse_spoilt(state.step, row["loss"], "validation text")


def note_masks_(state: TrainState, record: Record) -> None:
    """Add the density to the table "density" whenever masks changed."""
    if state.evolution is None:
        return
    rows, digest = record.table("density"), state.masks.digest()
    if not rows or rows[-1]["masks"] != digest:
        dead = sum(outputs for outputs, _ in state.masks.dead.values())
        record.add("density", step=state.step, density=state.density, dead_neurons=dead, masks=digest)


def due(state: TrainState, every: int) -> bool:
    """Whether something that happens every so many steps (0: never), and at the end, is due now."""
    return state.step == state.settings.steps or bool(every and state.step % every == 0)


def advance_(
    state: TrainState,
    record: Record,
    validation: Part,
    *,
    after: Callable[[TrainState], None],
    label: str = "pretrain",
    take: Callable[[TrainState], dict[str, Any]] = take_step_,
    loss_of: Measure = held_out_loss,
) -> None:
    """Train to the end from the first step or a restored one.

    ``after`` is called after every step: it may save, or raise to stop.
    """
    settings = state.settings
    if state.step == 0:
        measure_(state, record, validation, loss_of)
        note_masks_(state, record)
    with _bar(state, label) as bar:
        while state.step < settings.steps:
            try:
                row = take(state)
            except DivergedError:
                # If the step before spoilt the weights, that is the error to raise.
                refuse_spoilt(
                    state.step, loss_of(state.model, validation.rows, batch=settings.batch)[0], "validation text"
                )
                raise
            record.add("train", **row)
            if state.step % settings.every == 0 or state.step == settings.steps:
                note_masks_(state, record)
            if due(state, settings.eval_every):
                measure_(state, record, validation, loss_of)
            if bar:
                bar.advance(loss=row["loss"], lr=f"{row['lr']:.1e}", **_pace(state))
            after(state)
    _note_speed(state, record)


def _bar(state: TrainState, label: str) -> Any:
    steps = state.settings.steps
    return Progress(label, total=steps, resume_at=state.step) if label else contextlib.nullcontext()


def _pace(state: TrainState) -> dict[str, Any]:
    rate = f"{state.step * state.tokens / state.seconds:,.0f}"
    return {"tokens_per_s": rate} | ({} if state.evolution is None else {"density": f"{state.density:.3g}"})


def _note_speed(state: TrainState, record: Record) -> None:
    if not record.table("speed"):
        seconds = state.seconds / state.step
        rate = {"tokens_per_second": state.tokens / seconds, "step_seconds": seconds}
        record.add("speed", backend=state.settings.backend, **rate, seconds=state.seconds)
