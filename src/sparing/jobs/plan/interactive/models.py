"""Models that the page knows by heart, from their published configurations."""

from __future__ import annotations

from typing import Final

from sparing.layersample.price.shape import Shape


def _llama(layers: int, width: int, ffn: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = False) -> Shape:
    return Shape(
        layers=layers, width=width, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=128 if width > 2048 else 64,
        vocab=vocab, tied=tied,
    )  # fmt: skip


def _qwen(layers: int, width: int, ffn: int, heads: int, kv_heads: int) -> Shape:
    return Shape(
        layers=layers, width=width, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=128, vocab=152064, qkv_bias=True
    )


MODELS: Final[dict[str, Shape]] = {
    "SmolLM2-135M": _llama(30, 576, 1536, 9, 3, 49152, tied=True),
    "TinyLlama-1.1B": _llama(22, 2048, 5632, 32, 4, 32000),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256, tied=True),
    "Llama-3.2-3B": _llama(28, 3072, 8192, 24, 8, 128256, tied=True),
    "Llama-2-7B": _llama(32, 4096, 11008, 32, 32, 32000),
    "Mistral-7B": _llama(32, 4096, 14336, 32, 8, 32768),
    "Qwen2.5-7B": _qwen(28, 3584, 18944, 28, 4),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256),
    "Qwen3-8B": Shape(
        layers=36, width=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, qk_norm=True
    ),
    "Llama-2-13B": _llama(40, 5120, 13824, 40, 40, 32000),
    "Qwen2.5-32B": _qwen(64, 5120, 27648, 40, 8),
    "Llama-3.1-70B": _llama(80, 8192, 28672, 64, 8, 128256),
}  # fmt: skip
"""Name -> sizes. ``tests/jobs/plan/test_interactive.py`` holds their parameters to the published counts."""
