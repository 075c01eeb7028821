"""ResNet-50 for ImageNet: from a TensorFlow.js folder to a plain torch module with its weights in safetensors.

The network is the one of Keras: convolutions have biases, batch normalisation divides by √(variance + 0.001), and the
stride of a stage lies in its first 1 × 1 convolution. torchvision's network differs in all three and cannot hold these
weights.

Source: He, Zhang, Ren & Sun 2015 (arXiv:1512.03385), Table 1, 50 layers; weights of ``keras.applications.ResNet50``.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparing.errors import UserError

# file of the parameters and running statistics, by the names of ``ResNet50.state_dict()``
WEIGHTS = "model.safetensors"

LABELS = "labels.json"  # file of the 1000 class names, a list in the order of the logits

# files of the package, which joined are all tensors one after another
SHARDS = tuple(f"group1-shard{index}of25.bin" for index in range(1, 26))

MEANS = (103.939, 116.779, 123.68)  # means of ImageNet's pixels in blue, green, red (of 255)

SIDE = 224  # height and width the network was trained with (pixels)

# name of a stage -> inner channels, its blocks, and the stride of the first
STAGES = {"2": (64, "abc", 1), "3": (128, "abcd", 2), "4": (256, "abcdef", 2), "5": (512, "abc", 2)}


class Bottleneck(nn.Module):
    """One residual block: 1 × 1, 3 × 3, 1 × 1, each with batch normalisation, and a shortcut."""

    def __init__(self, into: int, inner: int, stride: int, *, project: bool) -> None:
        """Lay out a block from ``into`` channels to 4 · ``inner``; ``project`` gives the shortcut a convolution."""
        super().__init__()
        self.branch2a = _convolution(into, inner, 1, stride)
        self.branch2b = _convolution(inner, inner, 3, 1)
        self.branch2c = _convolution(inner, 4 * inner, 1, 1)
        self.branch1 = _convolution(into, 4 * inner, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, into, height, width) to (batch, 4 · inner, height / stride, width / stride)."""
        inner = F.relu(self.branch2b(F.relu(self.branch2a(x))))
        return F.relu(self.branch2c(inner) + self.branch1(x))


class ResNet50(nn.Module):
    """Images to 1000 logits."""

    def __init__(self) -> None:
        """Lay out the layers; ``load_resnet50`` fills them."""
        super().__init__()
        self.stem = _convolution(3, 64, 7, 2)
        into, stages = 64, OrderedDict[str, nn.Module]()
        for stage, (inner, blocks, stride) in STAGES.items():
            for at, block in enumerate(blocks):
                stages[f"{stage}{block}"] = Bottleneck(into, inner, 1 if at else stride, project=not at)
                into = 4 * inner
        self.blocks = nn.Sequential(stages)
        self.classifier = nn.Linear(into, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Map prepared images (batch, 3, height, width) to logits (batch, 1000)."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, padding=1)
        return self.classifier(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


def _convolution(into: int, out: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(into, out, size, stride, padding=size // 2)
    return nn.Sequential(OrderedDict(conv=convolution, norm=nn.BatchNorm2d(out, eps=1e-3, momentum=0.01)))


def prepare_images(images: Tensor) -> Tensor:
    """Map uint8 RGB (batch, height, width, 3) to float32 (batch, 3, 224, 224): middle square, BGR, less the means."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        got, why = f"{images.dtype} of shape {tuple(images.shape)}", "photographs are uint8 (batch, height, width, 3)"
        raise UserError("images", got=got, why=why, do="pass 0 … 255 in red, green, blue")
    height, width = images.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[:, top : top + side, left : left + side].permute(0, 3, 1, 2).float()
    sized = F.interpolate(square, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return sized.flip(1) - torch.tensor(MEANS).view(1, 3, 1, 1)


def load_resnet50(folder: Path) -> ResNet50:
    """Load the network from its folder in the cache."""
    try:
        state = load_file(folder / WEIGHTS)
        # on meta: initial weights would be drawn from the caller's random stream, and thrown away
        with torch.device("meta"):
            model = ResNet50()
        model.load_state_dict(state, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        why = f"it does not hold the weights of this network ({str(error).splitlines()[0]})"
        raise UserError("folder of resnet50", got=folder, why=why, do="pass what fetch('resnet50') returns") from error
    # load_state_dict(assign=True) takes the loaded tensors' flag, which is off
    return model.requires_grad_().eval()


def read_labels(folder: Path) -> list[str]:
    """Return the names of the 1000 classes in the order of the logits."""
    labels: list[str] = json.loads((folder / LABELS).read_text(encoding="utf-8"))
    return labels


def build_resnet50(members: Path, out: Path) -> None:
    """Rebuild the network from the files of the package."""
    listed = json.loads((members / "model.json").read_text(encoding="utf-8"))["weightsManifest"][0]["weights"]
    theirs = split_tensors(b"".join((members / name).read_bytes() for name in SHARDS), listed)
    with torch.device("meta"):
        wanted = ResNet50().state_dict()
    save_file(torch_state(theirs, wanted), out / WEIGHTS, metadata={"format": "pt"})
    named = json.loads((members / LABELS).read_text(encoding="utf-8"))
    labels = [named[str(index)] for index in range(len(named))]
    (out / LABELS).write_text(json.dumps(labels, indent=0) + "\n", encoding="utf-8")


def split_tensors(data: bytes, listed: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Cut the joined shards, little-endian float32, into tensors by Keras's names."""
    if odd := [each["name"] for each in listed if each["dtype"] != "float32"]:
        raise ValueError(f"{odd[0]} is not float32")
    sizes = [math.prod(each["shape"]) for each in listed]
    if len(data) != 4 * sum(sizes):
        raise ValueError(f"the list asks for {4 * sum(sizes)} bytes, the shards have {len(data)}")
    numbers = torch.from_numpy(np.frombuffer(data, dtype="<f4").copy())
    pieces = zip(listed, torch.split(numbers, sizes), strict=True)
    return {each["name"]: piece.view(each["shape"]) for each, piece in pieces}


def torch_state(theirs: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename Keras's tensors and bring them into torch's layout; the batch counters are zero."""
    state: dict[str, Tensor] = {}
    left = dict(theirs)
    for name, template in wanted.items():
        if name.endswith("num_batches_tracked"):
            state[name] = torch.zeros((), dtype=torch.int64)
            continue
        state[name] = _to_torch_layout(name, left.pop(keras_name(name), None), template)
    if left:
        raise ValueError(f"the network has no place for {next(iter(left))}")
    return state


def _to_torch_layout(name: str, value: Tensor | None, template: Tensor) -> Tensor:
    """From Keras's (height, width, into, out) and (into, out) to torch's (out, into, height, width) and (out, into)."""
    if value is not None and value.ndim > 1:
        value = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
    if value is None or value.shape != template.shape:
        got = "nothing" if value is None else f"shape {tuple(value.shape)}"
        raise ValueError(f"{name} should have shape {tuple(template.shape)}, the package has {got}")
    # safetensors refuses tensors whose rows do not lie one after another
    return value.contiguous()


def keras_name(name: str) -> str:
    """Return what Keras calls a tensor of ours.

    Example:
        >>> keras_name("blocks.3b.branch2a.norm.running_var")
        'bn3b_branch2a/moving_variance'
    """
    *path, last = name.split(".")
    if path == ["classifier"]:
        return f"fc1000/{'kernel' if last == 'weight' else 'bias'}"
    place = "conv1" if path[0] == "stem" else f"{path[1]}_{path[2]}"
    if path[-1] == "conv":
        kind = "kernel" if last == "weight" else "bias"
        return f"{place}/{kind}" if place == "conv1" else f"res{place}/{kind}"
    kinds = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    return f"bn_conv1/{kinds[last]}" if place == "conv1" else f"bn{place}/{kinds[last]}"
