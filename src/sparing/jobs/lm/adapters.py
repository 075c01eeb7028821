"""Low-rank additions to the linear layers of a live language model, made by peft."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparing.errors import UserError, require
from sparing.jobs.limits import at_least, positive
from sparing.jobs.live import device_of, seeded


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Train low-rank additions to the linear layers.

    Source: Hu et al. 2022 (arXiv:2106.09685), where the paper writes r for ``rank`` and α for ``alpha``.
    """

    rank: int = 16
    """Inner width of each addition (count); the paper's r."""

    alpha: float = 32.0
    """Numerator of the scale α / r of each addition (ratio)."""

    dropout: float = 0.0
    """Share of inputs that each addition does not see (0 to 1)."""

    targets: str = "all-linear"
    """Which linear layers get one: `all-linear` (all but the head), or module names (`q_proj,v_proj`)."""

    def __post_init__(self) -> None:
        """Reject adapters that add nothing."""
        at_least(1, self, "rank", why="an addition of rank 0 is none", within="lora.")
        positive(self, "alpha", why="the additions are scaled by alpha / rank", within="lora.")
        kept = 0 <= self.dropout < 1
        require(kept, "lora.dropout", self.dropout, "it is a share of the inputs", "pass 0 <= dropout < 1")
        named = bool(self.targets.strip(", "))
        require(named, "lora.targets", repr(self.targets), "no layer is named", "pass all-linear or module names")


def with_adapters_(model: nn.Module, method: Lora, seed: int) -> nn.Module:
    """Add LoRA adapters to a live model, in place; everything else is frozen. ``seed`` draws their first values."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        do = "run pip install 'sparing[lm]'"
        raise UserError("peft", got="not installed", why="LoRA is done by it", do=do) from None
    targets: Any = method.targets if method.targets == "all-linear" else re.split(r"[ ,]+", method.targets.strip(", "))
    config = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        with seeded(seed, "adapters", device=device_of(model)), warnings.catch_warnings():
            # peft uses a name that transformers has deprecated.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        why = str(error).splitlines()[0][:160]
        raise UserError("lora.targets", got=method.targets, why=why, do="pass all-linear or module names") from None
    return adapted
