"""Models and batches without memory: fake tensors in the place of real or meta ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sparing.errors import UserError
from sparing.memory.steps import Batch


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a module's structure with fake CPU tensors for its parameters, its buffers and its other tensors.

    Ties, flags and hooks are kept. Nothing is allocated and the module is not changed, so one on the meta device or one
    whose layers were replaced by peft will do.

    Args:
        model: On any device.
        mode: The mode that the fake tensors belong to.
        dtype: Type of the floating-point tensors of the copy; by default their own.

    Returns:
        The copy.
    """
    found = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor))
    with mode:
        fakes = {id(tensor): _fake(tensor, dtype) for tensor in found}
    return copy.deepcopy(model, fakes)


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def empty_batch(batch: Batch) -> dict[str, Tensor]:
    """Make a batch of zeros on the CPU; under a fake mode nothing is allocated.

    Args:
        batch: Name -> a tensor, of which only shape and type are taken, or (shape, dtype).

    Returns:
        Name -> zeros.

    Raises:
        UserError: If an entry is neither.
    """
    return {name: _zeros(name, entry) for name, entry in batch.items()}


def _zeros(name: str, entry: object) -> Tensor:
    if isinstance(entry, Tensor):
        return torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.dtype):
        return torch.zeros(tuple(entry[0]), dtype=entry[1], device="cpu")
    raise UserError(
        f"batch[{name!r}]",
        got=repr(entry),
        why="its size is unknown",
        do="pass a tensor or a pair (shape, torch.dtype)",
    )


@contextmanager
def one_text_per_row(batch: Batch) -> Iterator[None]:
    """Let transformers see that rows are not packed, which it would read off the values of the positions.

    It takes a fake tensor for a compiler's trace and then always builds a mask, which in turn keeps attention from its
    cheapest kernel. Without ``position_ids`` in the batch no row holds several texts and no mask is needed. (With an
    ``attention_mask`` in the batch the mask is built, as it is for real padding.)

    Args:
        batch: The batch that the model will see.

    Yields:
        Once, with transformers' search for packed rows switched off; restored on exit.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    search = getattr(masking, "find_packed_sequence_indices", None)
    if search is None or "position_ids" in batch:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = search


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Let operations on the CPU keep what their CUDA kernels keep for the backward pass.

    Dropout keeps a mask of one byte per element there instead of one element, and attention can drop weights without
    leaving the fused kernel, which on the CPU falls back to one that keeps the whole attention matrix. The functions
    are exchanged, because a mode for torch functions is off while torch goes backward, where checkpoints recompute.

    Yields:
        Once; the functions are back on exit.
    """
    functional: Any = F
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout = partial(_dropout, dropout)
    functional.scaled_dot_product_attention = partial(_attention, attention)
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention that drops nothing, whether ``dropout_p`` came by place or by name."""
    if len(args) > 4:
        return func(*args[:4], 0.0, *args[5:], **kwargs)
    return func(*args, **(kwargs | {"dropout_p": 0.0}))


def _dropout(
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout as on CUDA: the mask is boolean and nothing is kept when nothing is dropped."""
    if not training or p == 0.0:
        same: Tensor = func(input, p, training, inplace)
        return same
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped
