"""What other tools say that fine-tuning a model takes (bytes), each asked the way its own documentation does.

Beside the library: ``pip install --no-deps training_hub==0.11.2 torch-kitsune==0.7.0``. Neither is given weights, only
the model on the meta device. peft's own script (``method_comparison``) runs the training it reports on, on a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a block of a Llama."""


def accelerate(model: nn.Module, dtype: str) -> int:
    """``accelerate estimate-memory``: full training with Adam, without activations; the one way that it knows."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    found = estimate_training_usage(calculate_maximum_sizes(model)[0], dtype)
    return int(max(found.values()))


def kitsune(model: nn.Module, dtype: str, *, length: int, rank: int | None) -> int:
    """torch-kitsune: full training or adapters, activations from its own estimate."""
    from kitsune.predict.estimator import predict_memory
    from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory

    if rank is None:
        return int(predict_memory(model, (length,), 1, dtype, optimizer="adamw").total_bytes)
    config = LoRAConfig(rank=rank, target_modules=LAYERS)
    return int(estimate_lora_memory(model, (length,), 1, dtype, config).total_bytes)


def training_hub(model: Any, *, length: int, rank: int | None) -> tuple[int, int]:
    """training_hub: its lower and upper bound for one GPU; full training in float32, adapters in 16 bits."""
    known = _training_hub()
    with (
        patch.object(known, "AutoModel", types.SimpleNamespace(from_pretrained=lambda *_, **__: model)),
        # it caches what it knows of a model beside its own code
        patch.object(known.BasicEstimator, "_update_model_storage", lambda self: None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        given = {"num_gpus": 1, "model_path": "a model", "batch_size": 1, "max_seq_len": length, "verbose": 0}
        estimator = known.BasicEstimator(**given) if rank is None else known.LoRAEstimator(**given, lora_r=rank)
        low, _, high = estimator.estimate()
    return int(low), int(high)


@cache
def _training_hub() -> Any:
    """Its estimator alone: the package itself imports trainers that are not needed here."""
    place = importlib.util.find_spec("training_hub")
    assert place is not None
    assert place.origin is not None
    path = Path(place.origin).parent / "profiling" / "memory_estimator.py"
    spec = importlib.util.spec_from_file_location("training_hub_estimator", path)
    assert spec is not None
    assert spec.loader is not None
    # the one table that it takes from its trainer: the layers that adapters sit on, for Llamas these
    trainer = types.ModuleType("mini_trainer.osft_utils")
    trainer.MODEL_CONFIGS = {"default": {"patterns": LAYERS}}  # type: ignore[attr-defined]
    known = {"mini_trainer": types.ModuleType("mini_trainer"), "mini_trainer.osft_utils": trainer}
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, known):
        spec.loader.exec_module(module)
    return module
