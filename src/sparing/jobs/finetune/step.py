"""One optimizer step: a window of micro-batches, clipped by its global norm, applied only if it is finite."""

from __future__ import annotations

import math
import time
from typing import Any

from sparing.jobs.finetune.batches import window
from sparing.jobs.finetune.course import Course, touch_
from sparing.jobs.live import device_of, seeded
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import Packed
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError, clip_


def gradients_(course: Course, data: Packed) -> dict[str, Any]:
    """Add up the gradient of the mean loss over one window: exactly that of one batch of all its rows."""
    pace = course.training
    rows = window(course.step, rows=data.rows, batch=pace.batch, accumulate=pace.accumulate, seed=pace.seed)
    tokens = int((data.labels[rows.flatten()][:, 1:] != IGNORED).sum())
    total = 0.0
    with seeded(pace.seed, "dropout", course.step, device=device_of(course.model)):
        for micro in rows:
            loss = loss_sum(course.model, data, micro) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
    course.seen += rows.numel() * data.length
    return {"tokens": tokens, "loss": total}


def take_step_(course: Course, data: Packed) -> dict[str, Any]:
    """One optimizer step; returns a row of the table "train"."""
    begin, pace = time.perf_counter(), course.training
    if course.sampler is not None:
        course.sampler.begin_step(course.step)
    parameters = list(touch_(course).values())
    lr = rate(course.step, peak=pace.peak, steps=course.steps, warmup=pace.warmup, schedule=pace.schedule)
    for group in course.optimizer.param_groups:
        group["lr"] = lr
    row = gradients_(course, data)
    norm = clip_(parameters, pace.clip)
    if not (math.isfinite(row["loss"]) and math.isfinite(norm)):
        course.optimizer.zero_grad(set_to_none=True)
        raise DivergedError(f"step {course.step + 1}: loss {row['loss']}, gradient norm {norm}, learning rate {lr:g}")
    course.optimizer.step()
    course.optimizer.zero_grad(set_to_none=True)
    course.step += 1
    course.seconds += time.perf_counter() - begin
    return {"step": course.step, **row, "lr": lr, "grad_norm": norm, "seconds": course.seconds}
