"""The model: a transformers configuration from settings or a file, built with the library's own initial weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.errors import UserError, require
from sparing.jobs.lm.models import check_fields
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.torch_state import seeded


def config_for(settings: Pretrain, vocabulary: int, end: int | None = None) -> Any:
    """The transformers configuration of a run."""
    if settings.model_config is not None:
        return _given(settings.model_config, vocabulary, end)
    from transformers import GPT2Config, LlamaConfig

    heads = settings.width // settings.head_dim
    same = {"vocab_size": vocabulary, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    if settings.family == "gpt2":
        shape = {"n_embd": settings.width, "n_layer": settings.layers, "n_head": heads}
        return _without_dropout(GPT2Config(**shape, **same, n_positions=settings.length))
    return LlamaConfig(
        **same,
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=settings.kv_heads or heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.length,
        tie_word_embeddings=False,
    )


def _given(path: Path, vocabulary: int, end: int | None) -> Any:
    """A configuration from the disk, for another vocabulary."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    do = "pass a config.json or the directory that holds one"
    require(file.is_file(), "model_config", path, "there is no such file", do)
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        config = AutoConfig.for_model(plain["model_type"], **{k: v for k, v in plain.items() if k != "model_type"})
    except Exception as error:  # noqa: BLE001 - a field of a wrong type has errors of other libraries
        words = str(error).strip().partition("\n")[0][:100]
        why = f"it is no transformers configuration ({type(error).__name__}: {words})"
        raise UserError("model_config", got=path, why=why, do=do) from None
    check_fields(path, config, what="model_config")
    config.vocab_size = vocabulary
    config.bos_token_id = config.eos_token_id = config.pad_token_id = end
    return _without_dropout(config)


def _without_dropout(config: Any) -> Any:
    """Set every rate of dropping out to 0, by whatever name: data is not repeated often enough to need it."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))
        elif hasattr(value, "model_type"):  # a configuration inside, as of attention
            _without_dropout(value)
    return config


def context_of(settings: Pretrain) -> int:
    """Tokens per row: the setting, at most what the configuration has positions for."""
    if settings.model_config is not None:
        limit = getattr(_given(settings.model_config, 1, None), "max_position_embeddings", None)
        fits = not isinstance(limit, int) or settings.length <= limit
        require(fits, "length", settings.length, f"the configuration has {limit} positions", "pass a smaller one")
    return settings.length


def fresh_model(config: Any, *, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """A float32 model with transformers' initial weights, from a named stream; the global generators stay as they were.

    Weights are drawn on the CPU, so that they are the same on every device.
    """
    from transformers import AutoModelForCausalLM

    try:
        with seeded(seed, "init", device=torch.device("cpu")):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        why = f"no causal language model comes of it ({str(error).strip().splitlines()[0][:100]})"
        raise UserError(
            "model_config", got=getattr(config, "model_type", "?"), why=why, do="pass another --model-config"
        ) from None
    return model.to(device)


def shape_of(model: Any) -> str:
    """A model in a few words, such as "Llama of 4 layers and width 128"."""
    config = model.config
    name = {"llama": "Llama", "gpt2": "GPT-2"}.get(config.model_type, config.model_type)
    return f"{name} of {config.num_hidden_layers} layers and width {config.hidden_size}"
