"""Checkpoints of two-of-four models for engines that serve: ordinary, or with the live weights only.

The compressed format is ``sparse-24-bitmask`` of compressed-tensors: for each linear layer two values of every four in
``compressed`` [out, in/2], their places in ``bitmask`` [out, in/8] (one bit a weight, the lowest first), and ``shape``
[2, 1]; ``quantization_config`` of ``config.json`` says which layers. compressed-tensors 0.9 to 0.14 and vLLM 0.8 to
0.18 read it; later versions have dropped it (vllm-project/vllm#36799) and read the ordinary form.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.masks.mask_set import Masks, masks_of
from sparing.scaling.model.fold import fold_

_EIGHT = 8  # weights whose places share a byte (count)


def save_two_of_four(model: nn.Module, folder: str | os.PathLike[str], *, compressed: bool = False) -> list[str]:
    """Save a scaled transformers model whose masks are two of four, folded; the model itself trains on.

    Args:
        model: With masks drawn by ``NofM(n=2, m=4)``.
        folder: Where ``config.json`` and the safetensors go.
        compressed: Store live weights and a bit mask, about 9/16 of a layer in half precision, for the engines named
            above; otherwise an ordinary checkpoint with exact zeros, which any engine reads.

    Returns:
        Paths of the two-of-four layers.

    Raises:
        UserError: If the model is none of transformers', or a mask is not two of four along the fan-in.
    """
    root, masks = submodule(model, ""), masks_of(model)
    if not callable(getattr(root, "save_pretrained", None)):
        do = "save fold_(model).state_dict() in a format of your own"
        raise UserError("model", got=type(root).__name__, why="it has no config.json to describe it", do=do)
    layers = {name.removesuffix(".weight"): _two_of_four(root, masks, name) for name in masks}
    folded: Any = fold_(copy.deepcopy(root), untie=True)
    folded.save_pretrained(folder)
    if compressed:
        dense = [path for path, module in folded.named_modules() if isinstance(module, nn.Linear)]
        _compress_files(Path(folder), layers)
        _describe(Path(folder), ignore=[path for path in dense if path not in layers], masks=masks)
    return list(layers)


def compress_two_of_four(weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return ``compressed``, ``bitmask`` and ``shape`` of a weight [out, in], of which ``mask`` marks two in four."""
    places = _fill_up(mask)
    rows, columns = weight.shape
    bits = places.view(rows, columns // _EIGHT, _EIGHT).to(torch.int32)
    powers = torch.tensor([1 << bit for bit in range(_EIGHT)], dtype=torch.int32)
    return {
        "compressed": weight[places].view(rows, columns // 2),
        "bitmask": (bits * powers).sum(-1).to(torch.uint8),
        "shape": torch.tensor([[rows], [columns]]),
    }


def _fill_up(mask: Tensor) -> Tensor:
    """Mark two of every four, the live ones among them: a group with fewer stores zeros."""
    # stable: the first of the masked places fill up
    order = mask.view(-1, 4).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :2]
    return torch.zeros_like(mask).view(-1, 4).scatter_(1, order, value=True).view_as(mask)


def _two_of_four(root: nn.Module, masks: Masks, name: str) -> Tensor:
    """Return a mask on the CPU; refuse what the format cannot hold."""
    layer, mask = submodule(root, name.rpartition(".")[0]), masks[name].cpu()
    why = ""
    if not isinstance(layer, nn.Linear) or not name.endswith(".weight"):
        why = f"{type(layer).__name__} is not nn.Linear, of which alone engines know two of four"
    elif mask.shape[1] % _EIGHT:
        why = f"its fan-in {mask.shape[1]} is no multiple of {_EIGHT}"
    elif int(mask.view(-1, 4).sum(1).max()) > 2:
        why = "more than two of some four neighbours along the fan-in are live"
    if why:
        do = "draw masks by apply_(model, plan, masks=NofM(n=2, m=4)) at density 1/2, or use fold_ and save_pretrained"
        raise UserError(f"mask of {name}", got=f"shape {tuple(mask.shape)}", why=why, do=do)
    return mask


def _compress_files(folder: Path, layers: Mapping[str, Tensor]) -> None:
    """Rewrite each file of a checkpoint, and the index if there are several."""
    from safetensors.torch import load_file, save_file

    where: dict[str, str] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, value in load_file(file).items():
            path = name.removesuffix(".weight")
            if name.endswith(".weight") and path in layers:
                parts = compress_two_of_four(value, layers[path])
                tensors |= {f"{path}.{key}": part.contiguous() for key, part in parts.items()}
            else:
                tensors[name] = value
        save_file(tensors, file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")


def _describe(folder: Path, *, ignore: list[str], masks: Masks) -> None:
    """Name the format in ``config.json``, in the words of compressed-tensors 0.13."""
    config = folder / "config.json"
    said = cast("dict[str, Any]", json.loads(config.read_text()))
    zero = sum(int((~mask).sum()) for mask in masks.values())
    said["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "version": "0.13.0",
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "global_sparsity": zero / sum(p.numel() for p in masks.model.parameters()),
            "targets": ["Linear"],
            "ignore": ignore,
        },
    }
    config.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
