"""Two small nets as functions of their weights: a perceptron, and a language model of bytes."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from sparing.seeds import stream

Weights = dict[str, Tensor]
Activation = Literal["gelu", "relu"]

BYTES = 257  # 256 bytes, and the end of a row
HEADS, BLOCKS = 4, 2


def _normal(seed: int, name: str, *shape: int) -> Tensor:
    """Weights of variance 1 / fan-in, from a stream of their own."""
    drawn = torch.randn(shape, generator=stream(seed, "attribute", "initial", name))
    return drawn / math.sqrt(shape[0])


def perceptron(seed: int, *, inputs: int, width: int, classes: int) -> Weights:
    """Initial weights of inputs-width-classes."""
    return {
        "in": _normal(seed, "in", inputs, width), "in_bias": torch.zeros(width),
        "out": _normal(seed, "out", width, classes), "out_bias": torch.zeros(classes),
    }  # fmt: skip


def logits(theta: Weights, x: Tensor, activation: Activation) -> Tensor:
    """(B, inputs) -> (B, classes)."""
    hidden = getattr(functional, activation)(x @ theta["in"] + theta["in_bias"])
    scores: Tensor = hidden @ theta["out"] + theta["out_bias"]
    return scores


def language_model(seed: int, *, width: int, length: int) -> Weights:
    """Initial weights of a transformer of two blocks over bytes."""
    theta = {"embed": 0.02 * _normal(seed, "embed", BYTES, width) * math.sqrt(BYTES)}
    theta["position"] = 0.02 * torch.randn((length, width), generator=stream(seed, "attribute", "initial", "position"))
    for block in range(BLOCKS):
        for name, rows, columns in (
            ("mix", width, 3 * width), ("join", width, width), ("up", width, 4 * width), ("down", 4 * width, width),
        ):  # fmt: skip
            theta[f"{name}{block}"] = _normal(seed, f"{name}{block}", rows, columns)
    return theta | {"head": _normal(seed, "head", width, BYTES)}


def next_bytes(theta: Weights, ids: Tensor, activation: Activation) -> Tensor:
    """(B, L) bytes -> logits of the next ones (B, L, 257)."""
    x = theta["embed"][ids] + theta["position"][: ids.shape[1]]
    size = x.shape[-1:]
    for block in range(BLOCKS):
        mixed = functional.layer_norm(x, size) @ theta[f"mix{block}"]
        q, k, v = mixed.reshape(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ theta[f"join{block}"]
        up = functional.layer_norm(x, size) @ theta[f"up{block}"]
        x = x + getattr(functional, activation)(up) @ theta[f"down{block}"]
    return functional.layer_norm(x, size) @ theta["head"]


def row_losses(theta: Weights, ids: Tensor, known: Tensor, activation: Activation) -> Tensor:
    """Mean loss of the next byte of each row (nat), shape (B,); ``known``: whether a byte is of the row, (B, L)."""
    scores = next_bytes(theta, ids[:, :-1], activation).transpose(1, 2)
    each = functional.cross_entropy(scores, ids[:, 1:], reduction="none")
    live = known[:, 1:].to(each.dtype)
    return (each * live).sum(1) / live.sum(1)
