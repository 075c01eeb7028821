"""Small language models of every family that has a closed-form price, and their flags set as a price says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparing.layersample.price.activations import Trained

transformers = pytest.importorskip("transformers")

LAYERS, VOCAB, BATCH, LENGTH = 3, 50, 2, 12
SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "vocab_size": VOCAB,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "grouped": transformers.LlamaConfig(**GROUPED),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "gemma": transformers.GemmaConfig(**GROUPED, head_dim=8, pad_token_id=None),
    "gpt2": transformers.GPT2Config(n_embd=24, n_layer=LAYERS, n_head=4, vocab_size=VOCAB, n_positions=32, **GPT2),
}


def model_of(name: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    config = CONFIGS[name]
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)


def parts(model: nn.Module) -> tuple[Any, nn.Module, list[nn.Module]]:
    """Blocks, final norm and tables of any of these families."""
    inner = model.base_model
    tables = [module for module in inner.children() if isinstance(module, nn.Embedding)]
    return getattr(inner, "layers", None) or inner.h, getattr(inner, "norm", None) or inner.ln_f, tables


def train_(model: nn.Module, trained: Trained) -> None:
    """Set the flags of a real model."""
    layers, norm, tables = parts(model)
    model.requires_grad_(False)
    for index in trained.blocks:
        layers[index].requires_grad_(True)
    if trained.head:
        model.get_output_embeddings().requires_grad_(True)
    for table in tables:
        table.requires_grad_(trained.embed)
    norm.requires_grad_(trained.tail)


def lora_targets(name: str, *, ends: bool) -> list[str]:
    """Names of the linear maps that peft adapts."""
    if name == "gpt2":
        return ["c_attn", "c_proj", "c_fc"]
    maps = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return maps + ["embed_tokens", "lm_head"] * ends
