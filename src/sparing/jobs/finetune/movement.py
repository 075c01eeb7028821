"""How far each block moved from the weights in a model directory, which are read one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sparing.blocks import find_blocks, named_parameters, tied

_PIECE = 2**20  # elements compared at once


class Stored(Mapping[str, Tensor]):
    """Tensors by the names that the files have for them."""

    def __init__(self, path: Path) -> None:
        """Read the names."""
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor; the file is open meanwhile only, or all that was read of it would stay in memory."""
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Tensors (count)."""
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, which is not read; None if there is none of that name."""
        if name not in self._files:
            return None
        with safe_open(self._files[name], framework="pt") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def holds(self, model: nn.Module) -> bool:
        """Whether every parameter of a model is here, in its shape; not if only the loader understands the layout."""
        meta = {name: parameter.detach().to("meta") for name, parameter in named_parameters(model).items()}
        return all(self.shape(name) == tuple(part.shape) for part, name in self.beside(model, meta))

    def beside(self, model: nn.Module, params: Mapping[str, Tensor]) -> list[tuple[Tensor, str]]:
        """Pair weights of a live model with their names in the files, which may lack some."""
        from transformers.core_model_loading import revert_weight_conversion

        # Of a tied weight the file may have the other name.
        aliases = {owner: alias for alias, owner in tied(model).items()}
        # As ``save_pretrained`` writes them, such as the matrices of experts one by one.
        parts: dict[str, Tensor] = revert_weight_conversion(model, {k: v.detach() for k, v in params.items()})
        return [(part, name if name in self._files else aliases.get(name, name)) for name, part in parts.items()]


def movement(model: nn.Module, original: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Per block in order of use, ``moved`` = ‖Δθ‖ / ‖θ‖: 2-norms in float64 over its parameters, θ before training."""
    rows = []
    for block in find_blocks(model):
        pairs = (
            original.beside(model, block.params)
            if isinstance(original, Stored)
            else [(value.detach(), name) for name, value in block.params.items()]
        )
        moved = size = 0.0
        for now, name in pairs:
            # Piece by piece: in float64 a whole embedding would need eight bytes an element, twice.
            pieces = (torch.split(part.flatten(), _PIECE) for part in (now, original[name].to(now.dtype)))
            for one, other in zip(*pieces, strict=True):
                part, was = one.double().cpu(), other.double().cpu()
                moved += (part - was).square().sum().item()
                size += was.square().sum().item()
        ratio = math.sqrt(moved / size) if size else math.nan
        rows.append({"block": block.name, "role": block.role, "index": block.index, "moved": ratio})
    return rows
