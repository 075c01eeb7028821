"""A gate keeps one parameter sparse: its mask is a buffer beside it, and its gradient is zero wherever it is masked.

The weight itself stays an ordinary parameter that is zero off the mask. With zero gradients most optimizers leave
masked weights and their state at exactly zero, so every key of the state dict and every step is that of an ordinary
model. What writes to them all the same is undone: an optimizer's step as soon as it is over, anything else (an edit, a
moving average, a load into a part of the model) at the next forward pass or ``state_dict``. A tensor that stands in
for the weight during a call, as under ``torch.func.functional_call``, is masked in that call.

Writing to ``parameter.data`` leaves no trace that torch shows. On the CPU the sum of the weight tells; a write that
keeps the sum to the last bit (a permutation of entries) is undone by the next optimizer step or ``state_dict`` only.
Elsewhere, where reading a sum would hold the device up, the weight is masked at each pass.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.structure import is_embedding

_GATES = "_sparing_gates"  # in the module's __dict__: name of the parameter there -> gate
_WATCH = "_sparing_gate_hooks"  # there too: ids of the hooks that run before and after its forward pass
_BY_PARAMETER: WeakValueDictionary[int, Gate] = WeakValueDictionary()  # id of a hooked parameter -> its gate
SUFFIX = "_mask"
"""What follows a parameter's name in the name of its mask."""


class Gate:
    """Mask of one parameter: a persistent boolean buffer, and a hook that masks the gradient before it accumulates.

    A deep copy of the module, alone or within its model, has a gate of its own on the copied parameter.
    """

    def __init__(self, module: nn.Module, local: str, mask: Tensor) -> None:
        """Register the mask and hook the gradient."""
        self.module, self.local = module, local
        self.keep = False
        """Whether to collect the gradient as it was before masking."""
        self.dense: Tensor | None = None
        """Sum of the unmasked gradients since ``keep`` was set."""
        parameter = cast("nn.Parameter", module._parameters[local])
        module.register_buffer(local + SUFFIX, mask.to(parameter.device))
        module.__dict__.setdefault(_GATES, {})[local] = self
        if _WATCH not in module.__dict__:
            before = module.register_forward_pre_hook(_before_forward)
            after = module.register_forward_hook(_after_forward, always_call=True)
            module.__dict__[_WATCH] = (before.id, after.id)
        self._hook(parameter)

    @property
    def mask(self) -> Tensor:
        """The live entries."""
        return cast("Tensor", self.module._buffers[self.local + SUFFIX])

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as the module has it now."""
        return cast("nn.Parameter", self.module._parameters.get(self.local))

    @property
    def is_current(self) -> bool:
        """Whether the module still has the parameter that was hooked."""
        return self.module._parameters.get(self.local) is self._hooked

    @torch.no_grad()
    def set_(self, mask: Tensor) -> None:
        """Replace the mask in place, and put weight and gradient off the new one to zero."""
        self.mask.copy_(mask)
        self.zero_()

    def zero_(self) -> None:
        """Put weight and gradient off the mask to zero."""
        off = ~self.mask
        with torch.no_grad():
            self.parameter.masked_fill_(off, 0)
            if self.parameter.grad is not None:
                self.parameter.grad.masked_fill_(off, 0)
        self._remember()

    def settle_(self, *, written: bool = False) -> None:
        """Put the weight to zero off the mask if something has written to it since it was last seen to be."""
        if not self.is_current or (parameter := self.parameter).is_inference():
            return
        if getattr(parameter, "numbers_are_away", False):
            return  # a sharded model's between uses; what is gathered for the next pass is masked then
        if written or not self._unchanged():
            parameter.data.masked_fill_(~self.mask, 0)  # no new version: a backward pass may be waiting for the weight
            self._remember()

    def mask_input_weight_(self) -> None:
        """Mask what the module is about to multiply by, for the time of a call if it is not its own parameter."""
        found = self.module._parameters.get(self.local)
        if found is None:
            raise UserError(
                f"{type(self.module).__name__}.{self.local}",
                got="no parameter of that name any more",
                why="pruning, parametrization or weight norm has put another in its place, which no mask holds",
                do="do that before plan and apply_, or take it off (prune.remove, remove_parametrizations)",
            )
        if found is self._hooked:
            self.settle_()
        elif found.shape == self.mask.shape:
            self._replaced.append(found)
            self.module._parameters[self.local] = cast("Any", torch.where(self.mask, found, _zero_like(found)))

    def restore_weight_(self) -> None:
        """Give back what ``mask_input_weight_`` replaced."""
        if self._replaced:
            self.module._parameters[self.local] = self._replaced.pop()

    def rehook_(self) -> None:
        """Follow the module to another parameter, such as one that ``load_state_dict(assign=True)`` has put there."""
        if not self.is_current:
            self._handle.remove()
            self._hook(self.parameter)

    def leaks(self) -> bool:
        """Tell whether a weight lives off the mask."""
        return bool(self.parameter.detach()[~self.mask].count_nonzero())

    def remove_(self) -> None:
        """Take hook, buffer and gate away; the weight stays as it is."""
        self._handle.remove()
        _BY_PARAMETER.pop(id(self._hooked), None)
        module = self.module
        del module._buffers[self.local + SUFFIX]
        gates = module.__dict__[_GATES]
        del gates[self.local]
        if not gates:
            before, after = module.__dict__.pop(_WATCH)
            del module.__dict__[_GATES]
            module._forward_pre_hooks.pop(before, None)
            for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                cast("dict[int, Any]", hooks).pop(after, None)

    def _remember(self) -> None:
        """Remember the weight as it is."""
        self._version, self._sum = self.parameter._version, _sum_of(self.parameter)

    def _unchanged(self) -> bool:
        """Tell whether the weight is as it was, also where something has written to ``data``."""
        parameter = self.parameter
        if parameter._version != self._version:
            return False
        if torch._C._len_torch_dispatch_stack():
            return True  # tensors may be fake, without numbers; the next pass on real ones looks
        return type(parameter) is not nn.Parameter or (parameter.is_cpu and _sum_of(parameter) == self._sum)

    def _hook(self, parameter: nn.Parameter) -> None:
        _watch_optimizers()
        trains = parameter.requires_grad
        self._hooked, self._replaced = parameter, cast("list[nn.Parameter]", [])
        self._version, self._sum = parameter._version, _sum_of(parameter)
        _BY_PARAMETER[id(parameter)] = self
        tensor = cast("Any", parameter.requires_grad_(True))  # torch hooks nothing that is frozen
        self._handle = tensor.register_hook(self._masked)
        parameter.requires_grad_(trains)

    def _masked(self, gradient: Tensor) -> Tensor:
        if self.keep:
            seen = gradient.detach()
            self.dense = seen.clone() if self.dense is None else self.dense + seen
        if gradient.is_sparse:  # of a table that is looked up with sparse=True: only the rows that were
            rows = gradient.coalesce()
            values = rows.values().where(self.mask[tuple(rows.indices())], 0)
            return torch.sparse_coo_tensor(
                rows.indices(), values, rows.shape, check_invariants=False, is_coalesced=True
            )
        return torch.where(self.mask, gradient, _zero_like(gradient))

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "local": self.local, "hooked": self._hooked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hook anew: hooks on tensors are not pickled."""
        self.module, self.local, self.keep, self.dense = state["module"], state["local"], False, None
        self._hook(state["hooked"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        twin: Gate = object.__new__(Gate)
        memo[id(self)] = twin
        twin.local, twin.keep, twin.dense = self.local, False, None
        twin.module = copy.deepcopy(self.module, memo)
        twin._hook(copy.deepcopy(self._hooked, memo))
        return twin


@functools.cache
def _watch_optimizers() -> None:
    """Look at masked weights after every step of every optimizer, from the first gate of the process on."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _BY_PARAMETER:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gate = _BY_PARAMETER.get(id(parameter))
            if gate is not None and gate.parameter is parameter:
                gate.settle_(written=True)


def _before_forward(module: nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling():
        for gate in module.__dict__[_GATES].values():
            gate.mask_input_weight_()


def _after_forward(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for gate in module.__dict__[_GATES].values():
            gate.restore_weight_()


def _sum_of(parameter: Tensor) -> float | None:
    """Return the sum of a weight on the CPU; None where reading it would wait for a device, or there are no numbers."""
    if type(parameter) is not nn.Parameter or not parameter.is_cpu or torch._C._len_torch_dispatch_stack():
        return None
    with torch.no_grad():
        return float(parameter.sum(dtype=torch.promote_types(parameter.dtype, torch.float32)))


def _zero_like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def gates_in(module: nn.Module) -> dict[str, Gate]:
    """Return the gates of a module's own parameters."""
    return dict(module.__dict__.get(_GATES, {}))


def owner_and_name(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Find the module that owns a parameter."""
    path, _, local = name.rpartition(".")
    return submodule(model, path), local


def modules_sharing_weight(model: nn.Module, path: str) -> list[nn.Module]:
    """Find the layers that multiply by, or look up in, one weight: tied layers are several."""
    layer = submodule(model, path)
    weight = layer._parameters.get("weight")
    alike = (m for m in model.modules() if weight is not None and m._parameters.get("weight") is weight)
    return [layer, *(m for m in alike if m is not layer and is_embedding(m) == is_embedding(layer))]
