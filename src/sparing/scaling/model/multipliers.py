"""Numbers in the forward pass of unmodified modules: hooks that read them from buffers of the module.

The number is a 0-d buffer, so checkpoints hold it and ``to`` moves it; the hook finds it in the module it runs on, so
copies of a model have their own. It acts in training, evaluation and ``generate()``; only a loss
that reads the readout's weight without calling the readout (fused cross-entropies) would miss it: fold such a model
first. Three slots can hold one each:

    forward_scale   the input of a layer, or the output of an embedding
    branch_scale    the output of a layer, bias included
    query_scale     the queries of an attention, or the keys of one that is not called by parts
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sparing.errors import UserError

Slot = Literal["forward_scale", "branch_scale", "query_scale"]
"""Name of the buffer."""

Where = Literal["input", "output", "query_rows", "key_input"]
"""What is multiplied: the first input, the output, the first third of the output's last dimension (packed queries,
keys and values), or the second input of an attention that takes queries, keys and values: of its logits that leaves
only what the keys' bias adds, the same for every key, which softmax does not see."""

SLOTS: tuple[Slot, ...] = ("forward_scale", "branch_scale", "query_scale")

_HANDLES = "_sparing_scale_handles"  # in the module's __dict__: slot -> (handle, where)
HIDDEN = ("NonDynamicallyQuantizableLinear",)  # layers that their parent reads as tensors: forward is never called


def attach_(module: nn.Module, slot: Slot, value: float, *, where: Where) -> None:
    """Multiply by a number in every forward pass of a module; 1 is multiplied like any other."""
    kind = type(module).__name__
    if slot in module._buffers:
        why = "a second factor would multiply the first"
        raise UserError(slot, got=f"{kind} that has one", why=why, do="scale each model once")
    if kind in HIDDEN:
        why, do = "its owner reads the weight and never calls it", "use form='rescaled', or attention with own layers"
        raise UserError(slot, got=kind, why=why, do=do)
    # The parameters' dtype, widened to single precision: half precision would round the number.
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = torch.promote_types(next(floats, torch.float32), torch.float32)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    module.register_buffer(slot, torch.tensor(value, dtype=dtype, device=device))
    handle: Any
    if where in ("input", "key_input"):
        before = _before if where == "input" else _before_keys
        handle = module.register_forward_pre_hook(partial(before, slot=slot), with_kwargs=True)
    else:
        handle = module.register_forward_hook(partial(_after, slot=slot, packed=where == "query_rows"))
    _handles(module)[slot] = (handle.id, where)


def detach_(module: nn.Module, slot: Slot) -> None:
    """Remove a number with its hook and buffer, if the module has one."""
    if (held := _handles(module).pop(slot, None)) is not None:
        identity = held[0]
        # By id: a handle would remove the hook of the module it was made on, not that of a copy.
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks):
            cast("dict[int, Any]", hooks).pop(identity, None)
        del module._buffers[slot]
    if not _handles(module):
        module.__dict__.pop(_HANDLES, None)


def factor_of(module: nn.Module, slot: Slot) -> float:
    """Return the number a module holds; 1 without one."""
    held = module._buffers.get(slot)
    return 1.0 if held is None else float(held)


def set_factor_(module: nn.Module, slot: Slot, value: float) -> None:
    """Change the number a hooked module holds, in place."""
    held = module._buffers[slot]
    assert held is not None
    held.fill_(value)


def active_slots(module: nn.Module) -> dict[Slot, Where]:
    """Return slot -> what it multiplies, of the slots in use."""
    return {slot: where for slot, (_, where) in module.__dict__.get(_HANDLES, {}).items()}


def _handles(module: nn.Module) -> dict[Slot, tuple[int, Where]]:
    handles: dict[Slot, tuple[int, Where]] = module.__dict__.setdefault(_HANDLES, {})
    return handles


# Hooks are partials of plain functions: state of their own would not follow copies and pickles of a model.


def _scaled(value: Any, number: Tensor) -> Any:
    """Multiply a tensor, or the first of several, in its own dtype, which a 0-d factor does not widen."""
    return (value[0] * number, *value[1:]) if isinstance(value, tuple) else value * number


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, slot: Slot) -> Any:
    number = cast("Tensor", module._buffers[slot])
    # Some callers pass the input by keyword: the first tensor is it.
    if args:
        return (_scaled(args[0], number), *args[1:]), dict(kwargs)
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: _scaled(kwargs[name], number)}


def _before_keys(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, slot: Slot) -> Any:
    number = cast("Tensor", module._buffers[slot])
    if "key" in kwargs:
        return args, {**kwargs, "key": _scaled(kwargs["key"], number)}
    return (args[0], _scaled(args[1], number), *args[2:]), dict(kwargs)


def _after(module: nn.Module, args: Any, output: Any, *, slot: Slot, packed: bool) -> Any:
    number = cast("Tensor", module._buffers[slot])
    if not packed:
        return _scaled(output, number)
    rows = output.shape[-1] // 3
    return torch.cat([_scaled(output[..., :rows], number), output[..., rows:]], dim=-1)
