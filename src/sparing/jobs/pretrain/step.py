"""One optimizer step: rows, loss, gradient, clip, update, and the masks after it."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.live import device_of, seeded
from sparing.jobs.pretrain.inputs import crops
from sparing.jobs.pretrain.state import TrainState, evolve_
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError, clip_
from sparing.seeds import stream


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss in nats per token, shape ()."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(state: TrainState, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step (from 0), by seed and step alone: int64, (batch, context), on the model's device."""
    settings, device = state.settings, device_of(state.model)
    generator = stream(settings.seed, "batch", step)
    rows = crops(state.train, batch=settings.batch, context=settings.context, generator=generator)
    return rows[0].to(device), rows[1].to(device)


def set_rates_(state: TrainState) -> float:
    """Set every group's rate for the next step; returns the base rate."""
    settings = state.settings
    same = {"steps": settings.steps, "warmup": settings.warmup, "schedule": settings.schedule}
    lr = rate(state.step, peak=settings.lr, **same)  # type: ignore[arg-type]
    for group in state.groups:
        group["lr"] = lr * group["lr_scale"]
    return lr


def take_step_(state: TrainState) -> dict[str, Any]:
    """One optimizer step; returns a row of the table "train"."""
    start, settings = time.perf_counter(), state.settings
    lr = set_rates_(state)
    inputs, targets = batch_of(state, state.step)
    with seeded(settings.seed, "step", state.step, device=device_of(state.model)):
        loss = mean_loss(state.model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
    norm, value = clip_(list(state.model.parameters()), settings.clip), loss.item()
    if not (math.isfinite(value) and math.isfinite(norm)):
        state.optimizer.zero_grad(set_to_none=True)
        raise DivergedError(f"step {state.step + 1}: loss {value}, gradient norm {norm}, learning rate {lr:g}")
    state.optimizer.step()
    # Before gradients go: growing methods choose new weights by them.
    evolve_(state)
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.seconds += time.perf_counter() - start
    return {"step": state.step, "loss": value, "lr": lr, "grad_norm": norm, "seconds": state.seconds}
