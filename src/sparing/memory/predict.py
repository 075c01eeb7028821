"""The memory of a training step, found without allocating it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from sparing.memory.fakes import KeptValues, cuda_kernels, fake_copy
from sparing.memory.internals import FakeMode
from sparing.memory.sizes import Profile
from sparing.memory.steps import (
    Batch,
    Loss,
    MakeOptimizer,
    Step,
    Trainable,
    Training,
    prepare_,
    step_of,
    values_read,
    watch,
)


def predict(
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
    device: Literal["cpu", "cuda"] = "cpu",
) -> Profile:
    """Predict the bytes of a training step by category, without a GPU and without allocating them.

    Two steps run on fake tensors, which have shapes and no data, under a ledger of live tensors; the second is
    reported. The program that runs is the real one, so frozen parameters, no_grad, checkpointing and custom functions
    cost what they cost. Not seen: workspaces inside kernels, rounding and fragmentation of the allocator, the context
    of the device (together some hundred MiB on a GPU), and what fused recurrent kernels (LSTM, GRU) keep for
    themselves.

    Args:
        model: A module on any device, of which only the shapes are read (meta will do), or a function without
            arguments that makes one; it runs under ``torch.device("meta")``.
        batch: Name -> tensor, of which shape and type matter, or (shape, dtype). Values of integers matter too, since
            models read them to choose what they run: whether a mask pads anything, whether positions start again in a
            row. A shape of integers counts as zeros: everything is padding, and every token is a document of its own.
        optimizer: Parameters -> optimizer, for example ``partial(torch.optim.AdamW, lr=1e-4)``; called with the
            parameters that require gradients.
        trainable: Names of the parameters that train, or a predicate on the canonical name; by default the flags of the
            model stay.
        loss: Model and batch -> scalar, shape (); by default ``model(**batch).loss``.
        step: Model, optimizer and batch -> anything: a whole step of your own loop, in place of ``loss`` and
            ``accumulate``. It may switch flags but may not look at values.
        checkpointing: Whether blocks recompute their activations (models of transformers; non-reentrant).
        accumulate: Micro-batches per optimizer step (count); each has the size of ``batch``.
        dtype: Convert floating-point parameters and buffers first.
        device: Device whose behaviour to assume: on "cuda" dropout masks take a byte per element, and an optimizer that
            was not told otherwise works on all parameters at once (``foreach``), with temporaries as large as they are.

    Returns:
        The composition at the peak of the second step and at the end of each phase (bytes).

    Raises:
        UserError: If an argument is invalid, or the step looks at the values of a tensor.

    Example:
        >>> from functools import partial
        >>> profile = predict(
        ...     lambda: nn.Linear(1000, 10, bias=False),
        ...     {"x": ((4, 1000), torch.float32)},
        ...     partial(torch.optim.SGD, lr=0.1),
        ...     loss=lambda model, batch: model(batch["x"]).sum(),
        ... )
        >>> profile.params, profile.grads
        (40000, 40000)
    """
    training = Training(
        optimizer=optimizer, trainable=trainable, loss=loss, step=step, checkpointing=checkpointing,
        accumulate=accumulate,
    )  # fmt: skip
    # real tensors too, for a caller's loss may hold some, such as weights of classes
    mode = FakeMode(allow_non_fake_inputs=True)
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    fake = fake_copy(model, mode, dtype)
    kernels = cuda_kernels() if device == "cuda" else contextlib.nullcontext()
    with values_read(), mode, kernels, KeptValues(mode, batch) as values:
        made = prepare_(fake, training)
        if device == "cuda":
            # as torch chooses on CUDA: the fakes lie on the CPU, where it would choose otherwise
            for group in made.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        return watch(fake, made, values.batch(), step_of(training))
