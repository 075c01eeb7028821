"""Low-rank additions to the linear layers of a live language model, made by peft."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparing.errors import UserError, require
from sparing.jobs.limits import Count, Group, ShareBelowOne, Size
from sparing.jobs.torch_state import device_of, seeded


@dataclass(frozen=True, kw_only=True)
class Lora(Group, name="lora", flag="method", choices=("lora",)):
    """Settings of the low-rank additions to linear layers, used by `--method lora`.

    Source: Hu et al. 2022 (arXiv:2106.09685), where the paper writes r for ``rank`` and α for ``alpha``.
    """

    rank: Count = 16
    """Inner width of each addition (count); the paper's r."""

    alpha: Size = 32.0
    """Numerator of the scale α / r of each addition (ratio)."""

    dropout: ShareBelowOne = 0.0
    """Share of inputs that each addition does not see (0 to 1)."""

    targets: str = "all-linear"
    """Which linear layers get one: `all-linear` (all but the head), or module names (`q_proj,v_proj`)."""

    def __post_init__(self) -> None:
        """Reject adapters that add nothing."""
        super().__post_init__()
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
