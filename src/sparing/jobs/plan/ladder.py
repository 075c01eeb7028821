"""A model known by its size alone: divided as the LLaMA nearest in size is."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from sparing.layersample.shape import Shape

# Blocks, width and inner width of LLaMA-like models: two small ones, TinyLlama, OpenLLaMA-3B, LLaMA-7B to 65B, and one
# of Llama-3.1-405B's blocks and width.
LADDER: Final = (
    (12, 768, 2048), (24, 1024, 2736), (22, 2048, 5632), (26, 3200, 8640), (32, 4096, 11008), (40, 5120, 13824),
    (60, 6656, 17920), (80, 8192, 22016), (126, 16384, 43690),
)  # fmt: skip

VOCABULARY: Final = 32000  # rows of their embeddings (count)


def shape_like(params: float) -> Shape:
    """The shape of a model of so many parameters: the nearest of ``LADDER``, its feed-forward width adjusted.

    Example:
        >>> shape = shape_like(65e9)
        >>> shape.layers, shape.width
        (80, 8192)
    """
    rungs = [
        Shape(layers=layers, width=width, ffn=ffn, heads=max(width // 128, 1), kv_heads=max(width // 128, 1),
              head_dim=128, vocab=VOCABULARY)
        for layers, width, ffn in LADDER
    ]  # fmt: skip
    # Depth and width of a real model; what is missing goes into the feed-forward part, three matrices a block.
    near = min(rungs, key=lambda rung: abs(math.log(rung.total / params)))
    missing = (params - near.total) / (3 * near.layers * near.width)
    return dataclasses.replace(near, ffn=max(round(near.ffn + missing), 1))
