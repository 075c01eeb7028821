"""The memory of a training step, measured on real tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from sparing.errors import UserError
from sparing.memory.fakes import empty_batch
from sparing.memory.sizes import Profile
from sparing.memory.steps import Batch, Loss, MakeOptimizer, Step, Trainable, Training, prepare_, step_of, watch


def measure(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    optimizer: MakeOptimizer,
    *,
    trainable: Trainable | None = None,
    loss: Loss | None = None,
    step: Step | None = None,
    checkpointing: bool = False,
    accumulate: int = 1,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Profile:
    """Measure the bytes of a training step by category; arguments as of ``predict``.

    On the CPU this is the ledger of live tensors over the second of two real steps. On CUDA a third step runs without
    the ledger and its peak is the allocator's; the excess over the ledger, rounding and workspaces, counts as
    transient.

    Args:
        model: A module, of which a copy is trained, or a function without arguments that makes one.
        batch: Name -> tensor, or (shape, dtype) for zeros.
        optimizer: Parameters -> optimizer.
        trainable: Names that train, or a predicate on the canonical name.
        loss: Model and batch -> scalar, shape ().
        step: A whole step in place of ``loss`` and ``accumulate``.
        checkpointing: Whether blocks recompute their activations (models of transformers).
        accumulate: Micro-batches per optimizer step (count).
        dtype: Convert floating-point parameters and buffers first.
        device: Where to run; by default where the model is.

    Returns:
        The composition at the peak and at the end of each phase (bytes).

    Raises:
        UserError: If an argument is invalid.
    """
    training = Training(
        optimizer=optimizer, trainable=trainable, loss=loss, step=step, checkpointing=checkpointing,
        accumulate=accumulate,
    )  # fmt: skip
    # before the copy: what the caller holds on the GPU already is no part of the step
    # on every GPU: a function says only by the model it makes where that is
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    copied = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    if any(parameter.is_meta for parameter in copied.parameters()):
        raise UserError("model", got="a model on the meta device", why="it has no data to run on", do="use predict")
    place = torch.device(device) if device else next((p.device for p in copied.parameters()), torch.device("cpu"))
    made = prepare_(copied.to(place, dtype), training)
    given = empty_batch(batch) | {name: entry for name, entry in batch.items() if isinstance(entry, torch.Tensor)}
    real = {name: tensor.to(place) for name, tensor in given.items()}
    profile = watch(copied, made, real, step_of(training), device=place.type)
    if place.type != "cuda":
        return profile
    # a step without the ledger: under a dispatch mode autograd does not sum gradients in place
    gc.collect()
    torch.cuda.reset_peak_memory_stats(place)
    step_of(training)(copied, made, real)
    torch.cuda.synchronize(place)
    held = before[torch.cuda.current_device() if place.index is None else place.index]
    unseen = torch.cuda.max_memory_allocated(place) - held - profile.total
    return replace(profile, transient=profile.transient + unseen)
