"""One optimizer step: rows, loss, gradient, clip, update, and the masks after it."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.live import device_of, seeded
from sparing.jobs.pretrain.course import Course, evolve_
from sparing.jobs.pretrain.material import crops
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError, clip_
from sparing.seeds import stream


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss in nats per token, shape ()."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(course: Course, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step (from 0), by seed and step alone: int64, (batch, context), on the model's device."""
    settings, device = course.settings, device_of(course.model)
    generator = stream(settings.seed, "batch", step)
    rows = crops(course.train, batch=settings.batch, context=settings.context, generator=generator)
    return rows[0].to(device), rows[1].to(device)


def set_rates_(course: Course) -> float:
    """Set every group's rate for the next step; returns the base rate."""
    settings = course.settings
    same = {"steps": settings.steps, "warmup": settings.warmup, "schedule": settings.schedule}
    lr = rate(course.step, peak=settings.lr, **same)  # type: ignore[arg-type]
    for group in course.groups:
        group["lr"] = lr * group["lr_scale"]
    return lr


def take_step_(course: Course) -> dict[str, Any]:
    """One optimizer step; returns a row of the table "train"."""
    begin, settings = time.perf_counter(), course.settings
    lr = set_rates_(course)
    inputs, targets = batch_of(course, course.step)
    with seeded(settings.seed, "step", course.step, device=device_of(course.model)):
        loss = mean_loss(course.model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
    norm, value = clip_(list(course.model.parameters()), settings.clip), loss.item()
    if not (math.isfinite(value) and math.isfinite(norm)):
        course.optimizer.zero_grad(set_to_none=True)
        raise DivergedError(f"step {course.step + 1}: loss {value}, gradient norm {norm}, learning rate {lr:g}")
    course.optimizer.step()
    evolve_(course)
    course.optimizer.zero_grad(set_to_none=True)
    course.step += 1
    course.seconds += time.perf_counter() - begin
    return {"step": course.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": course.seconds}
