"""The bytes of a training step: predicted before the first one, measured during the second."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, take_step_
from sparing.jobs.interrupts import stop_if_pressed
from sparing.jobs.lm.adapters import Lora, as_made
from sparing.jobs.lm.documents import name_of, packed, priced_on
from sparing.jobs.lm.losses import loss_of
from sparing.jobs.lm.meta import loss_tokens
from sparing.jobs.lm.optimizer import reason, shared_of
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.prices import assemble, kept, trained_of
from sparing.jobs.lm.step import FitStep
from sparing.jobs.torch_state import device_of
from sparing.layersample import Fixed, LayerSampling, Sampler
from sparing.memory import CATEGORIES, Bytes, Ledger
from sparing.memory.passes import trace
from sparing.report import Record


def as_state(found: Bytes, held: int) -> Bytes:
    """Count what an optimizer holds beside its state (bytes) as such; a ledger took it for activations.

    Example:
        >>> as_state(Bytes(optimizer=8, activations=5), 4)
        Bytes(params=0, grads=0, optimizer=12, activations=1, transient=0)
    """
    parts = {name: getattr(found, name) for name in CATEGORIES}
    parts["activations"] -= held
    parts["optimizer"] += held
    return Bytes(**parts)


def step_of(model: nn.Module, training: Training, data: Packed) -> FitStep:
    """The step of a run, as its record keeps it."""
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    attention = name_of(getattr(getattr(model, "config", None), "_attn_implementation", None))
    method = as_made(model, training.method) if isinstance(training.method, Lora) else training.method
    return FitStep(
        method=method, optimizer=training.optimizer, masters=has_copies(training), weights=training.weights,
        dtype=kind,  # type: ignore[arg-type]
        batch=training.batch, length=data.length, accumulate=training.accumulate, packing=data.positions is not None,
        attention=attention, checkpointing=training.checkpointing, loss_tokens=training.loss_tokens,
    )  # fmt: skip


def has_copies(training: Training) -> bool:
    """Whether 16-bit weights that train have 32-bit copies."""
    return training.masters or (isinstance(training.method, LayerSampling) and training.method.masters)


def predict_step(model: nn.Module, training: Training, data: Packed) -> Bytes:
    """Predict the bytes of a step at its peak from shapes, and from the rows that hold most documents.

    Rows packed with several documents need a mask, and with it attention repeats grouped keys and values; a micro-batch
    of rows with one document each uses less than predicted.
    """
    method, step = training.method, step_of(model, training, data)
    probe = method.probe if isinstance(method, LayerSampling) else 0
    why = "its steps hold no gradients, and the steps after it other blocks"
    require(not probe, "probe", probe, why, "pass probe=0")
    # The rows with the most documents, as many as a micro-batch has.
    starts = torch.ones(data.rows) if data.positions is None else (data.positions == 0).sum(dim=1)
    rows = starts.argsort(descending=True, stable=True)[torch.arange(training.batch) % data.rows]
    places = {} if data.positions is None else {"positions": data.positions[rows]}
    at_once = loss_tokens(model, step.loss_tokens, step.batch * step.length)
    device: Literal["cpu", "cuda"] = "cuda" if device_of(model).type == "cuda" else "cpu"
    with packed(places.get("positions")), priced_on(device):
        passes = trace(
            model, {"ids": data.ids[rows], "labels": data.labels[rows]} | places,
            loss=lambda model, batch: loss_of(model, at_once=at_once, **batch), accumulates=step.accumulates,
            device=device,
        )  # fmt: skip
    trains = [name for name, p in named_parameters(model).items() if p.requires_grad]
    return assemble(passes, trained_of(model, trains, step, parameters=0), step, device=device).bytes


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
    record.add("step", **step_of(state.model, state.training, data).describe())
    price = try_predict(state.model, state.training, data, record, "memory of a step")
    for name in (*CATEGORIES, "total"):
        record.add("memory", category=name, predicted=getattr(price, name, None), measured=None)
    if price is not None and (later := _later(state, step_of(state.model, state.training, data))):
        record.add("memory_later", state=later, peak=price.total + later)


def _later(state: TrainState, step: FitStep) -> int:
    """Bytes on the device of what blocks that rest now keep once each has trained."""
    sampler = state.sampler
    if not isinstance(sampler, Sampler) or isinstance(sampler.settings.sampler, Fixed):
        return 0
    on = set(sampler.trainable)
    resting = (tuple(p.shape) for unit in sampler.units for name, p in unit.params.items() if name not in on)
    device, host = kept(step, resting)
    return device if device_of(state.model).type == "cuda" else device + host


def watched_step_(state: TrainState, data: Packed, record: Record) -> dict[str, Any]:
    """Take a step; the second of a run is measured by a ledger, and on CUDA the third by the allocator."""
    device, step, before = device_of(state.model), state.step, state.seconds
    # Not the first step: only from the second on does the optimizer hold its state.
    if step == 1:
        held = state.sampler.state_dict()["tensors"] if isinstance(state.sampler, Sampler) else {}
        beside = [tensor for key, tensor in held.items() if key.startswith("master/")]
        del held  # also has state, which the step may replace and free
        beside += list(state.masters.weights.values()) if state.masters is not None else []
        beside += shared_of(state.optimizer)
        size = sum(t.nbytes for t in beside)
        with Ledger(state.model, state.optimizer, inputs=beside, device=device.type) as ledger:
            # the step of a resumed run replaces the masters it loaded, which must then be free to go
            beside.clear()
            row = take_step_(state, data)
        found = as_state(ledger.profile(), size)
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
