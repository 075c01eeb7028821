"""The training loop: steps, measured as they go, and what is noted of masks and rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from sparing.jobs.lm import page as lm
from sparing.jobs.lm.losses import held_out_loss, perplexity, refuse_spoilt
from sparing.jobs.pretrain.inputs import Part
from sparing.jobs.pretrain.state import TrainState, take_step_
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.run import take_steps
from sparing.jobs.step import DivergedError
from sparing.report import Record

UNITS = lm.UNITS | {"bits_per_byte": "bit/B"}


def evaluate(model: nn.Module, part: Part, *, batch: int, ranks: Ranks = ONE_PROCESS) -> dict[str, Any]:
    """Held-out ``loss`` (nat/token), ``bits_per_byte`` (comparable between tokenizers), ``perplexity``, ``tokens``."""
    loss, tokens = held_out_loss(model, part.rows, batch=batch, ranks=ranks)
    bits = loss / math.log(2) / part.bytes_per_token
    return {"loss": loss, "bits_per_byte": bits, "perplexity": perplexity(loss), "tokens": tokens}


def measure_(state: TrainState, record: Record, part: Part) -> None:
    """Add a row to the table "held_out"."""
    row = evaluate(state.model, part, batch=state.settings.batch, ranks=state.ranks)
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


def train(
    state: TrainState, record: Record, validation: Part, *, steps: Callable[..., None] = take_steps, **how: Any
) -> None:
    """Train to the end from the first step or a restored one, by ``steps`` as they are told ``how``."""
    settings = state.settings
    if state.step == 0:
        measure_(state, record, validation)
        note_masks_(state, record)

    def take_step() -> dict[str, Any]:
        try:
            row = take_step_(state)
        except DivergedError:
            # If the step before spoilt the weights, that is the error to raise.
            loss, _ = held_out_loss(state.model, validation.rows, batch=settings.batch, ranks=state.ranks)
            refuse_spoilt(state.step, loss, "validation text")
            raise
        record.add("train", **row)
        if state.step == settings.steps:
            state.stepper.finish_()
        if due(state, settings.mask_updates.every):
            note_masks_(state, record)
        if due(state, settings.evaluate_every):
            measure_(state, record, validation)
        rate = f"{state.step * state.tokens / state.seconds:,.0f}"
        density = {} if state.evolution is None else {"density": f"{state.density:.3g}"}
        return {"loss": row["loss"], "lr": f"{row['lr']:.1e}", "tokens_per_s": rate, **density}

    steps(state, take_step, total=settings.steps, label="pretrain", **how)
    if not record.table("speed"):
        seconds = state.seconds / state.step
        pace = {"tokens_per_second": state.tokens / seconds, "step_seconds": seconds}
        record.add("speed", backend=settings.backend, **pace, seconds=state.seconds)
