"""A gate keeps one parameter sparse: its mask is a buffer beside it, and its gradient is zero wherever it is masked.

The weight itself stays an ordinary parameter that is zero off the mask. With zero gradients Adam, AdamW, SGD with
momentum and Lion leave masked weights and their state at exactly zero, so every key of the state dict and every step
is that of an ordinary model.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparing.blocks import submodule
from sparing.scaling.structure import is_embedding

_GATES = "_sparing_gates"  # in the module's __dict__: name of the parameter there -> gate
SUFFIX = "_mask"
"""What follows a parameter's name in the name of its mask."""


class Gate:
    """Mask of one parameter: a persistent boolean buffer, and a hook that masks the gradient before it accumulates.

    A deep copy of the module, alone or within its model, has a gate of its own on the copied parameter.
    """

    def __init__(self, module: nn.Module, local: str, mask: Tensor) -> None:
        """Register the mask and hook the gradient.

        Args:
            module: Owner of the parameter.
            local: Its name there.
            mask: Boolean, of its shape.
        """
        self.module, self.local = module, local
        self.keep = False
        """Whether to collect the gradient as it was before masking."""
        self.dense: Tensor | None = None
        """Sum of the unmasked gradients since ``keep`` was set."""
        parameter = cast("nn.Parameter", module._parameters[local])
        module.register_buffer(local + SUFFIX, mask.to(parameter.device))
        module.__dict__.setdefault(_GATES, {})[local] = self
        self._hook(parameter)

    @property
    def mask(self) -> Tensor:
        """The live entries."""
        return cast("Tensor", self.module._buffers[self.local + SUFFIX])

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as the module has it now."""
        return cast("nn.Parameter", self.module._parameters[self.local])

    @property
    def holds(self) -> bool:
        """Whether the module still has the parameter that was hooked."""
        return self.module._parameters.get(self.local) is self._hooked

    @torch.no_grad()
    def set_(self, mask: Tensor) -> None:
        """Replace the mask in place, and put weight and gradient off the new one to zero.

        Args:
            mask: Boolean, of the same shape.
        """
        self.mask.copy_(mask)
        self.zero_()

    def zero_(self) -> None:
        """Put weight and gradient off the mask to zero."""
        off = ~self.mask
        with torch.no_grad():
            self.parameter.masked_fill_(off, 0)
            if self.parameter.grad is not None:
                self.parameter.grad.masked_fill_(off, 0)

    def rehook_(self) -> None:
        """Follow the module to another parameter, such as one that ``load_state_dict(assign=True)`` has put there."""
        if not self.holds:
            self._handle.remove()
            self._hook(self.parameter)

    def leaks(self) -> bool:
        """Tell whether a weight lives off the mask."""
        return bool(self.parameter.detach()[~self.mask].count_nonzero())

    def remove_(self) -> None:
        """Take hook, buffer and gate away; the weight stays as it is."""
        self._handle.remove()
        del self.module._buffers[self.local + SUFFIX]
        gates = self.module.__dict__[_GATES]
        del gates[self.local]
        if not gates:
            del self.module.__dict__[_GATES]

    def _hook(self, parameter: nn.Parameter) -> None:
        trains = parameter.requires_grad
        self._hooked = parameter
        tensor = cast("Any", parameter.requires_grad_(True))  # torch hooks nothing that is frozen
        self._handle = tensor.register_hook(self._masked)
        parameter.requires_grad_(trains)

    def _masked(self, gradient: Tensor) -> Tensor:
        if self.keep:
            seen = gradient.detach()
            self.dense = seen.clone() if self.dense is None else self.dense + seen
        return torch.where(self.mask, gradient, torch.zeros((), dtype=gradient.dtype, device=gradient.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        twin: Gate = object.__new__(Gate)
        memo[id(self)] = twin
        twin.local, twin.keep, twin.dense = self.local, False, None
        twin.module = copy.deepcopy(self.module, memo)
        twin._hook(copy.deepcopy(self._hooked, memo))
        return twin


def gates_in(module: nn.Module) -> dict[str, Gate]:
    """Return the gates of a module's own parameters.

    Args:
        module: Any module.

    Returns:
        Name of the parameter in the module -> gate.
    """
    return dict(module.__dict__.get(_GATES, {}))


def place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Find the module that owns a parameter.

    Args:
        model: The model, wrapped or not.
        name: Canonical name of the parameter.

    Returns:
        The module and the parameter's name there.
    """
    path, _, local = name.rpartition(".")
    return submodule(model, path), local


def sharers(model: nn.Module, path: str) -> list[nn.Module]:
    """Find the layers that multiply by, or look up in, one weight: tied layers are several.

    Args:
        model: The model, wrapped or not.
        path: Canonical path of one layer.

    Returns:
        That layer first, then the others of its kind, lookup or product.
    """
    layer = submodule(model, path)
    weight = layer._parameters.get("weight")
    alike = (m for m in model.modules() if weight is not None and m._parameters.get("weight") is weight)
    return [layer, *(m for m in alike if m is not layer and is_embedding(m) == is_embedding(layer))]
