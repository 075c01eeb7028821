"""One optimizer step of fine-tuning as data: what `plan` prices, what `finetune` runs, and what its record keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch

from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.names import Attention, Weights
from sparing.jobs.lm.optimizer import AdamW, Optimizer
from sparing.jobs.parallel import NO_PLAN
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full

Method = Full | LayerSampling | Lora  # what trains: everything, sampled blocks, or low-rank additions

DType = Literal["bfloat16", "float32", "float64"]

# Bytes of float32 logits up to which the loss of a micro-batch is taken at once.
AT_ONCE = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FitStep:
    """A step of fine-tuning: everything that decides what it holds in memory and computes."""

    method: Method
    optimizer: Optimizer = field(default_factory=AdamW)
    masters: bool = False  # whether 16-bit weights that train have 32-bit copies
    weights: Weights | None = None  # how linear weights that do not train are stored; None: as ``dtype``
    dtype: DType = "float32"  # of weights and arithmetic
    batch: int = 1  # rows of a micro-batch (count)
    length: int = 512  # tokens of a row (count)
    accumulate: int = 8  # micro-batches (count)
    packing: bool = True  # rows hold several documents, which do not see each other
    attention: Attention = "auto"  # "auto": what transformers takes for the model
    checkpointing: bool = False  # whether blocks compute their activations again in the backward pass
    plan: str = NO_PLAN  # how ranks share parameters, gradients and state; the batch is that of all of them
    ranks: int = 1  # processes that share it (count)
    loss_tokens: int | None = None  # tokens whose logits are held at once (count); 0: all; None: those of AT_ONCE

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and arithmetic."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def accumulates(self) -> bool:
        """Whether a micro-batch finds gradients of an earlier one."""
        return self.accumulate > 1

    @property
    def tokens(self) -> int:
        """Tokens of the whole step (count)."""
        return self.batch * self.length * self.accumulate

    def describe(self) -> dict[str, Any]:
        """The step as a row of a record: plain values."""
        row = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return row | {"loss_tokens": "as many as fit 256 MiB" if self.loss_tokens is None else self.loss_tokens}


def _plain(value: Any) -> Any:
    """A setting in words: a value with its numbers, such as ``Lora(rank=16, …)``."""
    return repr(value) if is_dataclass(value) else value


def tokens_at_once(vocabulary: int, asked: int | None) -> int:
    """Tokens whose logits the loss holds at once (count); 0: all of a micro-batch.

    Example:
        >>> tokens_at_once(128256, None), tokens_at_once(49152, 0)
        (512, 0)
    """
    if asked is not None:
        return asked
    return 1 << ((AT_ONCE // (4 * vocabulary)) or 1).bit_length() - 1
