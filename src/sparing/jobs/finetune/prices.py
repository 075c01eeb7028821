"""The bytes of a training step: predicted before the first one, measured during the second."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, take_step_
from sparing.jobs.interrupts import stop_if_pressed
from sparing.jobs.lm.losses import loss_of
from sparing.jobs.lm.optimizer import adamw_with_masters, reason
from sparing.jobs.lm.packing import Packed
from sparing.jobs.torch_state import device_of
from sparing.layersample import LayerSampling, Sampler
from sparing.layersample.masters import HALVES
from sparing.memory import CATEGORIES, Bytes, Ledger, predict
from sparing.report import Record


def as_state(found: Bytes, masters: int, category: Literal["transient", "activations"]) -> Bytes:
    """Count 32-bit copies of weights (``masters``, bytes) as optimizer state, wherever a ledger counted them.

    Example:
        >>> as_state(Bytes(optimizer=8, transient=5), 4, "transient")
        Bytes(params=0, grads=0, optimizer=12, activations=0, transient=1)
    """
    parts = {name: getattr(found, name) for name in CATEGORIES}
    parts[category] -= masters
    parts["optimizer"] += masters
    return Bytes(**parts)


def predict_step(model: nn.Module, training: Training, data: Packed) -> Bytes:
    """Predict the bytes of a step at its peak from shapes, and from the rows that hold most documents.

    Rows packed with several documents need a mask, and with it attention repeats grouped keys and values; a micro-batch
    of rows with one document each uses less than predicted.
    """
    method = training.method
    # A fresh optimizer: the real one must not get state before the first step.
    trainable = {name for name, p in named_parameters(model).items() if p.requires_grad}
    has_masters = isinstance(method, LayerSampling) and method.masters

    # Two steps, for optimizer state exists from the second on; a third micro-batch adds nothing to the peak.
    steps = iter((1, min(training.accumulate, 2)))

    def step(shapes: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
        for _ in range(next(steps)):
            (loss_of(shapes, **batch) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # The rows with the most documents, as many as a micro-batch has.
    starts = torch.ones(data.rows) if data.positions is None else (data.positions == 0).sum(dim=1)
    rows = starts.argsort(descending=True, stable=True)[torch.arange(training.batch) % data.rows]
    places = {} if data.positions is None else {"positions": data.positions[rows]}
    price = predict(
        model,
        {"ids": data.ids[rows], "labels": data.labels[rows]} | places,
        partial(adamw_with_masters, masters=has_masters),
        trainable=trainable,
        step=step,
        device="cuda" if device_of(model).type == "cuda" else "cpu",
    )
    halves = [p for p in model.parameters() if p.requires_grad and p.dtype in HALVES]
    return as_state(price, 4 * sum(p.numel() for p in halves) if has_masters else 0, "transient")


def try_predict(model: nn.Module, training: Training, data: Packed, record: Record, quantity: str) -> Bytes | None:
    """``predict_step``; if it fails, None, and the table "unpredicted" says why."""
    try:
        return predict_step(model, training, data)
    except Exception as error:  # noqa: BLE001 - any model may raise anything, and a failed prediction must not stop a run
        stop_if_pressed(error)
        record.add("unpredicted", quantity=quantity, why=reason(error))
        return None


def note_predicted(state: TrainState, data: Packed, record: Record) -> None:
    """Add the table "memory" with predictions, if they succeed; ``watched_step_`` adds measurements."""
    if state.sampler is not None:
        state.sampler.begin_step(state.step)
    price = try_predict(state.model, state.training, data, record, "memory of a step")
    for name in (*CATEGORIES, "total"):
        record.add("memory", category=name, predicted=getattr(price, name, None), measured=None)


def watched_step_(state: TrainState, data: Packed, record: Record) -> dict[str, Any]:
    """Take a step; the second of a run is measured by a ledger, and on CUDA the third by the allocator."""
    device, step, before = device_of(state.model), state.step, state.seconds
    # Not the first step: only from the second on does the optimizer hold its state.
    if step == 1:
        held = state.sampler.state_dict()["tensors"] if isinstance(state.sampler, Sampler) else {}
        masters = [tensor for key, tensor in held.items() if key.startswith("master/")]
        with Ledger(state.model, state.optimizer, inputs=masters, device=device.type) as ledger:
            row = take_step_(state, data)
        found = as_state(ledger.profile(), sum(t.nbytes for t in masters), "activations")
        for one in record.rows:
            if one["table"] == "memory":
                one["measured"] = getattr(found, str(one["category"]))
        # A ledger is slow, so the step under it counts as long as the mean of those before.
        state.seconds = before + before / step
        return row | {"seconds": state.seconds}
    if step == 2 and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        row = take_step_(state, data)
        peak, rows = torch.cuda.max_memory_allocated(device), [r for r in record.rows if r["table"] == "memory"]
        memory = {one["category"]: one for one in rows}
        if measured := [one["measured"] for one in rows if one["measured"] is not None]:
            # What the allocator held beyond the ledger, rounding and workspaces, is transient.
            for name in ("transient", "total"):
                memory[name]["measured"] = int(memory[name]["measured"] or 0) + peak - int(measured[-1])
        return row
    return take_step_(state, data)
