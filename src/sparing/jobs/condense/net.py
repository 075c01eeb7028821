"""The convolutional net of the condensation experiments as pure functions of a dict of tensors.

Pixels are centred; three blocks of 3 × 3 convolution, ReLU, instance norm with its own scale and shift, and average
pooling by two follow; then one linear layer.

Source: Shen et al., NeurIPS 2024 (arXiv:2406.14095), section 4.1 and its released code; the architecture is that of
Gidaris & Komodakis 2018 as used by Zhao et al. 2021 (arXiv:2006.05929).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]

GREY, CONTRAST = 0.5, 0.25  # what pixels are centred on and divided by: they enter as −2 to 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the net takes and gives."""

    channels: int  # of an image
    side: int  # height and width of an image (pixels)
    classes: int
    width: int  # channels of each block; 128 in the paper
    depth: int = 3  # blocks; 3 in the paper

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, in order of use."""
        shapes: dict[str, tuple[int, ...]] = {}
        for block in range(self.depth):
            into = self.channels if block == 0 else self.width
            shapes[f"block{block}.weight"] = (self.width, into, 3, 3)
            shapes[f"block{block}.bias"] = shapes[f"block{block}.shift"] = (self.width,)
            shapes[f"block{block}.scale"] = (self.width,)
        features = self.width * (self.side >> self.depth) ** 2
        return shapes | {"linear.weight": (self.classes, features), "linear.bias": (self.classes,)}


def init_weights(shape: Shape, generator: torch.Generator) -> Weights:
    """Fresh float32 weights: matrices normal with variance 1 / inputs, scales 1, the rest 0."""
    weights: Weights = {}
    for name, size in shape.parameters.items():
        if name.endswith(".weight"):
            weights[name] = torch.randn(size, generator=generator) / math.sqrt(math.prod(size[1:]))
        else:
            weights[name] = torch.ones(size) if name.endswith(".scale") else torch.zeros(size)
    return weights


def logits(weights: Weights, images: Tensor) -> Tensor:
    """Scores (N, classes) of images (N, channels, side, side), 0 to 1; of any floating-point type."""
    # Three blocks learn far less from images whose background is 0 (docs/decisions/hypergradients.md).
    out, block = (images - GREY) / CONTRAST, 0
    while f"block{block}.weight" in weights:
        part = f"block{block}."
        out = F.conv2d(out, weights[part + "weight"], weights[part + "bias"], padding=1)
        # the norm after the activation, as in the authors' code
        out = F.instance_norm(F.relu(out), weight=weights[part + "scale"], bias=weights[part + "shift"])
        out, block = F.avg_pool2d(out, 2), block + 1
    return F.linear(out.flatten(1), weights["linear.weight"], weights["linear.bias"])


def penalty(weights: Weights) -> Tensor:
    """Sum of squares of all weights, ‖θ‖² (no half)."""
    return torch.stack([(weight * weight).sum() for weight in weights.values()]).sum()
