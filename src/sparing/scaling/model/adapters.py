"""Adapters (LoRA and its kin, as peft makes them) around layers of a scaled model: no merge may change the function.

Beside a masked layer an adapter is dense: merged into the weight, its part off the mask would be zeroed at the next
pass, and a factor on the layer would scale what the adapter adds. Both are refused before the weight has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from sparing.errors import UserError
from sparing.scaling.masks.gates import gates_in
from sparing.scaling.masks.sharded import part
from sparing.scaling.model.multipliers import active_slots, factor_of

_LAYER = "base_layer"  # where every tuner of peft keeps the layer that it wraps


def watch_merges_(root: nn.Module) -> None:
    """Guard the adapters that a scaled model has, and those that any layer of any scaled model will get."""
    _watch_wrapping()
    for module in root.modules():
        if (layer := module._modules.get(_LAYER)) is not None:
            _on_wrapping(module, _LAYER, layer)


def adapted(root: nn.Module) -> Iterator[nn.Module]:
    """Layers of a model that adapters wrap."""
    found = (module._modules.get(_LAYER) for module in root.modules())
    return (layer for layer in found if layer is not None)


def only_adapters(root: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether a state dict holds numbers of adapters alone, as peft loads them."""
    paths = [f"{prefix}{path}." for path, module in root.named_modules() if _LAYER in module._modules]
    own = [key for key in state if key.startswith(prefix)]
    return bool(own) and all(
        any(key.startswith(path) and not key.startswith(f"{path}{_LAYER}.") for path in paths) for key in own
    )


@functools.cache
def _watch_wrapping() -> None:
    """Look at every module that another takes in, from the first scaled model of the process on."""
    # An adapter loaded from disk can be merged before any pass, so hooks of the model itself would come too late.
    register_module_module_registration_hook(_on_wrapping)


def _innermost(layer: nn.Module) -> nn.Module:
    """The layer itself, where adapters of several kinds lie around each other."""
    return layer if (inner := layer._modules.get(_LAYER)) is None else _innermost(inner)


def _on_wrapping(wrapper: nn.Module, name: str, child: nn.Module | None) -> None:
    if name != _LAYER or child is None or not hasattr(wrapper, "merge"):
        return
    layer = _innermost(child)
    if isinstance(layer, nn.MultiheadAttention):
        # peft merges these at every pass, so that one pass and a merge agree; off the masks neither can
        if any(gates_in(module) for module in layer.modules()):
            got, why = "one around a masked MultiheadAttention", "it is merged at every pass, where the masks undo it"
            raise UserError("adapter", got=got, why=why, do="make it on fold_(model), or on other layers")
    elif gates_in(layer) or active_slots(layer):
        # A partial in the place of the method, not a closure: copies and pickles of the wrapper then guard themselves.
        wrapper.__dict__["merge"] = partial(_merge, wrapper)


@torch.no_grad()
def _merge(wrapper: Any, *args: Any, **options: Any) -> Any:
    """Merge, and take it back and refuse if the model would compute something else."""
    layer = _innermost(wrapper)
    kept = {name: part(p).detach().clone() for name, p in layer._parameters.items() if p is not None}
    listed = list(wrapper.merged_adapters)
    result = type(wrapper).merge(wrapper, *args, **options)
    got, why, do = _loss(layer, lambda name: part(layer.get_parameter(name)).detach() - kept[name])
    if not got:
        return result
    for name, before in kept.items():
        # through ``data``, as peft wrote it: the version of the parameter is then what it was
        part(layer.get_parameter(name).data).copy_(before)
    wrapper.merged_adapters[:] = listed
    raise UserError("merge", got=got, why=why, do=do)


def _loss(layer: nn.Module, added: Callable[[str], Tensor]) -> tuple[str, str, str]:
    """What of a merged adapter the layer would not compute, why, and what to do; empty if nothing."""
    kind = f"{type(layer).__name__} {list(next(iter(layer.parameters())).shape)}"
    for name, gate in gates_in(layer).items():
        if gate.leaks():
            change = added(name).double().square()
            share = float(change[~part(gate.mask)].sum() / change.sum())
            got = f"an adapter with {100 * share:.2g} % of its squares off the mask of {kind}"
            do = "keep it unmerged, or take the masks off first: fold_(model)"
            return got, "masked weights are zero, so that part would be lost", do
    for slot, where in active_slots(layer).items():
        if factor_of(layer, slot) != 1 and any(bool(added(name).count_nonzero()) for name in layer._parameters):
            got = f"an adapter on {kind}, of which the {where} is multiplied by {factor_of(layer, slot):g}"
            return got, "what is merged would be multiplied too", "keep it unmerged, or make it anew on fold_(model)"
    return "", "", ""
