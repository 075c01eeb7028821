"""The weights in a model directory, read one tensor at a time beside a live model of the same kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from sparing.blocks import named_parameters, tied


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
        # Of a tied weight the file may have the other name.
        aliases = {owner: alias for alias, owner in tied(model).items()}
        parts = _as_saved(model, {name: value.detach() for name, value in params.items()})
        return [(part, name if name in self._files else aliases.get(name, name)) for name, part in parts.items()]


def _as_saved(model: Any, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as ``save_pretrained`` writes them, such as the matrices of experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, params)
    return found
