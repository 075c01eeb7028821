"""The optimizer of a fine-tuning step: what `finetune` runs is what `plan` prices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn

from sparing.errors import UserError
from sparing.layersample.masters import Masters

FORM: Final = "fused"  # which of torch's forms of AdamW runs: one kernel, which needs no temporaries

# Parameters, or groups of them -> the optimizer, without state.
adamw: Callable[..., torch.optim.AdamW] = partial(torch.optim.AdamW, fused=True)


def adamw_with_masters(parameters: list[nn.Parameter], *, masters: bool) -> torch.optim.Optimizer:
    """AdamW with or without 32-bit copies of half-precision weights, as a step of layer sampling has it."""
    made = adamw(parameters)
    if masters:
        Masters(made, {p: str(index) for index, p in enumerate(parameters)})
    return made


def reason(error: Exception) -> str:
    """Why a prediction failed, in a clause that begins with "not predicted"."""
    if isinstance(error, UserError):
        return f"not predicted: {error}"
    lines = str(error).strip().splitlines()
    return f"not predicted: {type(error).__name__}: {' '.join(lines[0].split())[:160] if lines else 'without a word'}"
