"""One optimizer step: a window of micro-batches, clipped by its global norm, applied only if it is finite."""

from __future__ import annotations

import math
import time
from typing import Any

from sparing.jobs.finetune.batches import window
from sparing.jobs.finetune.state import TrainState, touch_
from sparing.jobs.live import device_of, seeded
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import Packed
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError, clip_


def gradients_(state: TrainState, data: Packed) -> dict[str, Any]:
    """Add up the gradient of the mean loss over one window: exactly that of one batch of all its rows."""
    pace = state.training
    rows = window(state.step, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
    tokens = int((data.labels[rows.flatten()][:, 1:] != IGNORED).sum())
    total = 0.0
    with seeded(pace.seed, "dropout", state.step, device=device_of(state.model)):
        for micro in rows:
            # Divided by the labels of the whole window: a mean of micro-batch means would weigh short rows more.
            loss = loss_sum(state.model, data, micro) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
    state.seen += rows.numel() * data.length
    return {"tokens": tokens, "loss": total}


def take_step_(state: TrainState, data: Packed) -> dict[str, Any]:
    """One optimizer step; returns a row of the table "train"."""
    # The sampler first: it decides which parameters the step touches.
    begin, pace = time.perf_counter(), state.training
    if state.sampler is not None:
        state.sampler.begin_step(state.step)
    parameters = list(touch_(state).values())
    lr = rate(state.step, peak=pace.peak, steps=state.steps, warmup=pace.warmup, schedule=pace.schedule)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    row = gradients_(state, data)
    norm = clip_(parameters, pace.clip)
    if not (math.isfinite(row["loss"]) and math.isfinite(norm)):
        state.optimizer.zero_grad(set_to_none=True)
        raise DivergedError(f"step {state.step + 1}: loss {row['loss']}, gradient norm {norm}, learning rate {lr:g}")
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.seconds += time.perf_counter() - begin
    return {"step": state.step, **row, "lr": lr, "grad_norm": norm, "seconds": state.seconds}
