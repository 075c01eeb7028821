"""The optimizer of a fine-tuning step: what `finetune` runs is what `plan` prices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

FORM: Final = "fused"  # which of torch's forms of AdamW runs: one kernel, which needs no temporaries

# Parameters, or groups of them -> the optimizer, without state.
adamw: Callable[..., torch.optim.AdamW] = partial(torch.optim.AdamW, fused=True)
