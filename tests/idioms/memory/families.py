"""Tiny models of the families that people fine-tune, made from their configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, LENGTH, WIDTH = 192, 96, 48
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
_USUAL = _SIZES | {"intermediate_size": 96, "max_position_embeddings": 128, "pad_token_id": 0}
_GROUPED_MM = _USUAL | {"num_key_value_heads": 2, "head_dim": 12}
_EXPERTS = _GROUPED_MM | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _GROUPED_MM), "Mistral": ("mistral", _GROUPED_MM | {"sliding_window": 32}),
    "Qwen3": ("qwen3", _GROUPED_MM),
    "Gemma 3": ("gemma3_text", _GROUPED_MM | {"sliding_window": 32, "layer_types": ["sliding_attention",
        "full_attention"]}),
    "Phi-3": ("phi3", _USUAL | {"num_key_value_heads": 2}),
    "Mixtral": ("mixtral", _GROUPED_MM | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS),
    "gpt-oss": ("gpt_oss", _GROUPED_MM | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "GPT-2": ("gpt2", {"n_embd": WIDTH, "num_hidden_layers": 2, "n_head": 4, "vocab_size": VOCAB,
        "n_positions": 128}),
    "GPT-NeoX": ("gpt_neox", _USUAL),
    "OPT": ("opt", _SIZES | {"ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": WIDTH}),
    "OLMo 2": ("olmo2", _USUAL | {"num_key_value_heads": 2}),
}  # fmt: skip
"""Name -> type and sizes of its configuration."""


def config_of(family: str, **changes: Any) -> Any:
    """The configuration of a family, with changes."""
    from transformers import AutoConfig

    kind, sizes = FAMILIES[family]
    sizes = sizes | changes
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    return AutoConfig.for_model(kind, **sizes)


def causal(family: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A causal language model of a family, with its own dropout and attention."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = AutoModelForCausalLM.from_config(config_of(family, **changes))
    return made
