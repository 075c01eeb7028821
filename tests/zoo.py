"""Small real models that the tests share; every call gives a fresh one with its own stream of numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def redraw_(model: nn.Module, seed: int = 0, std: float = 0.05) -> nn.Module:
    """Fill every parameter from its own generator, so that no test leans on the global one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or ".ln_" in name else 0.0
            parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def llama(layers: int = 4, width: int = 16, vocab: int = 64, tied: bool = False, dtype=torch.float64, **changes):
    """A Hugging Face Llama of a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **changes,
    )
    return redraw_(LlamaForCausalLM(config).to(dtype))


def gpt2(layers: int = 3, width: int = 16, vocab: int = 64, dtype=torch.float64):
    """A Hugging Face GPT-2 (tied head, learned positions, Conv1D) without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=2,
        vocab_size=vocab,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return redraw_(GPT2LMHeadModel(config).to(dtype))


def tokens(batch: int = 2, length: int = 8, vocab: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """A batch for a causal language model: ids and the same ids as labels, shape (batch, length)."""
    ids = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}
