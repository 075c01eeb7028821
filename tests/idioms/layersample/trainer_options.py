"""Options of Hugging Face's Trainer under LISA, each against the loop by hand over what the Trainer fed."""

from __future__ import annotations

from typing import Any

from sparing.layersample import LayerSampling

_FROZEN = LayerSampling(active=1, period=2, embed=False)
_EACH_STEP = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}

TRAINERS: dict[str, tuple[dict[str, Any], LayerSampling | None]] = {
    "gradient checkpointing": ({"activation_checkpointing": True}, None),
    "gradient checkpointing, embedding frozen": ({"activation_checkpointing": True}, _FROZEN),
    "evaluate and save after every step": (_EACH_STEP, None),
    "max_grad_norm": ({"max_grad_norm": 0.01}, None),
    "fused AdamW": ({"optim": "adamw_torch_fused"}, None),
}
"""Option -> arguments and settings."""
