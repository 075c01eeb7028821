"""A gate keeps one parameter sparse: its mask is a buffer beside it, and its gradient is zero wherever it is masked.

The weight itself stays an ordinary parameter that is zero off the mask. With zero gradients most optimizers leave
masked weights and their state at exactly zero, so every key of the state dict and every step is that of an ordinary
model. What writes to them all the same is undone: an optimizer's step as soon as it is over, anything else (an edit, a
moving average, a load into a part of the model) at the next forward pass or ``state_dict``. A tensor that stands in
for the weight during a call, as under ``torch.func.functional_call``, is masked in that call.

A pass of a compiled model (``torch.compile``) does not look, since that would break its graph: there it is the next
optimizer step, eager pass or ``state_dict`` that undoes an edit, and a stand-in is not masked.

Writing to ``parameter.data`` leaves no trace in torch. On the CPU the sum of the weight is compared; a write that
keeps the sum to the last bit (a permutation of entries) is undone by the next optimizer step or ``state_dict`` only.
On other devices, where reading a sum would synchronize, the weight is masked at each pass.
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

_GATES = "_sparing_gates"  # in the module's __dict__: name of the parameter there -> gate
_WATCH = "_sparing_gate_hooks"  # there too: ids of the hooks that run before and after its forward pass
_BY_PARAMETER: WeakValueDictionary[int, Gate] = WeakValueDictionary()  # id of a hooked parameter -> its gate
SUFFIX = "_mask"  # follows a parameter's name in the name of its mask


class Gate:
    """Mask of one parameter: a persistent boolean buffer, and a hook that masks the gradient before it accumulates.

    A deep copy of the module, alone or within its model, has a gate of its own on the copied parameter.
    """

    def __init__(self, module: nn.Module, local: str, mask: Tensor) -> None:
        """Register the mask and hook the gradient."""
        self.module, self.local = module, local
        self.keep = False  # whether to collect the gradient as it was before masking
        self.dense: Tensor | None = None  # sum of the unmasked gradients since ``keep`` was set
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
    def live(self) -> tuple[int, int]:
        """How many entries live, and how many there are (counts)."""
        return int(self.mask.sum()), self.mask.numel()

    @property
    def has_dense(self) -> bool:
        """Whether a gradient of all places was collected."""
        return self.dense is not None

    @property
    def is_current(self) -> bool:
        """Whether the module still has the parameter that was hooked."""
        return self.module._parameters.get(self.local) is self._hooked

    @torch.no_grad()
    def set_(self, mask: Tensor) -> None:
        """Replace the mask in place and zero weight and gradient off the new one."""
        self.mask.copy_(mask)
        self.zero_()

    def zero_(self) -> None:
        """Zero weight and gradient off the mask."""
        off = ~self.mask
        with torch.no_grad():
            self.parameter.masked_fill_(off, 0)
            if self.parameter.grad is not None:
                self.parameter.grad.masked_fill_(off, 0)
        self._remember()

    def settle_(self, *, written: bool = False) -> None:
        """Zero the weight off the mask if something has written to it; ``written`` says so where no trace is left."""
        if not self.is_current or (parameter := self.parameter).is_inference():
            return
        if getattr(parameter, "numbers_are_away", False):
            return  # a sharded model's between uses; what is gathered for the next pass is masked then
        if written or not self._unchanged():
            # Through ``data``, which makes no new version: a backward pass may be waiting for the weight.
            parameter.data.masked_fill_(~self.mask, 0)
            self._remember()

    def mask_input_weight_(self) -> None:
        """Mask what the module is about to multiply by, for this call only if it is not its own parameter."""
        found = self.module._parameters.get(self.local)
        if found is None:
            got = "no parameter of that name any more"
            why = "pruning, parametrization or weight norm has put another in its place, which no mask holds"
            do = "do that before plan and apply_, or take it off (prune.remove, remove_parametrizations)"
            raise UserError(f"{type(self.module).__name__}.{self.local}", got=got, why=why, do=do)
        # Another tensor of this shape stands in for the weight, as under functional_call; another shape is not ours.
        if found is self._hooked:
            self.settle_()
        elif found.shape == self.mask.shape:
            self._replaced.append(found)
            self.module._parameters[self.local] = cast("Any", torch.where(self.mask, found, _zero_like(found)))

    def rehook_(self) -> None:
        """Hook the module's present parameter, such as one that ``load_state_dict(assign=True)`` has put there."""
        if not self.is_current:
            self._handle.remove()
            self._hook(self.parameter)

    def leaks(self) -> bool:
        """Tell whether a weight off the mask is not zero."""
        return bool(self.parameter.detach()[~self.mask].count_nonzero())

    def remove_(self) -> None:
        """Remove hook, buffer and gate; the weight stays as it is."""
        self._handle.remove()
        _BY_PARAMETER.pop(id(self._hooked), None)
        module = self.module
        del module._buffers[self.local + SUFFIX]
        gates = module.__dict__[_GATES]
        del gates[self.local]
        if not gates:
            before, after = module.__dict__.pop(_WATCH)
            del module.__dict__[_GATES]
            # Ids are the same in copies of the module; a handle would remove the hook of the module it was made on.
            module._forward_pre_hooks.pop(before, None)
            for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                cast("dict[int, Any]", hooks).pop(after, None)

    def _remember(self) -> None:
        """Remember the weight as it is."""
        self._version, self._sum = self.parameter._version, _sum_of(self.parameter)

    def _unchanged(self) -> bool:
        """Tell whether the weight is as it was, by version and, for writes to ``data``, by its sum."""
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
        tensor = cast("Any", parameter.requires_grad_(True))  # torch refuses hooks on frozen tensors
        self._handle = tensor.register_hook(self._masked)
        parameter.requires_grad_(trains)

    def _masked(self, gradient: Tensor) -> Tensor:
        if self.keep:
            # Cloned, for the memory is autograd's. Several passes add up, as they do in ``grad``.
            seen = gradient.detach()
            self.dense = seen.clone() if self.dense is None else self.dense + seen
        if gradient.is_sparse:  # of nn.Embedding(sparse=True): only the rows that were looked up
            rows = gradient.coalesce()
            values = rows.values().where(self.mask[tuple(rows.indices())], 0)
            return torch.sparse_coo_tensor(
                rows.indices(), values, rows.shape, check_invariants=False, is_coalesced=True
            )
        # Not a product with the mask: inf · 0 would be NaN where the weight is masked.
        return torch.where(self.mask, gradient, _zero_like(gradient))

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "local": self.local, "hooked": self._hooked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hook anew: hooks on tensors are not pickled."""
        self.module, self.local, self.keep, self.dense = state["module"], state["local"], False, None
        self._hook(state["hooked"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        twin: Gate = object.__new__(Gate)
        memo[id(self)] = twin  # first: the module holds this gate, so copying it comes back here
        twin.local, twin.keep, twin.dense = self.local, False, None
        twin.module = copy.deepcopy(self.module, memo)
        twin._hook(copy.deepcopy(self._hooked, memo))
        return twin


@functools.cache
def _watch_optimizers() -> None:
    """Check masked weights after every step of every optimizer, from the first gate of the process on."""
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
            if gate._replaced:  # a stand-in for the weight, which was masked for this call
                module._parameters[gate.local] = gate._replaced.pop()


def _sum_of(parameter: Tensor) -> float | None:
    """Return the sum of a weight on the CPU; None where reading it would synchronize, or the tensor is fake."""
    if type(parameter) is not nn.Parameter or not parameter.is_cpu or torch._C._len_torch_dispatch_stack():
        return None
    with torch.no_grad():
        return float(parameter.sum(dtype=torch.promote_types(parameter.dtype, torch.float32)))


def _zero_like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def gates_in(module: nn.Module) -> dict[str, Gate]:
    """Return local parameter name -> gate, of a module's own parameters."""
    return dict(module.__dict__.get(_GATES, {}))


def owner_and_name(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter, and the parameter's name there."""
    path, _, local = name.rpartition(".")
    return submodule(model, path), local
