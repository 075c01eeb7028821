"""Guards of a scaled model: its checkpoints must fit it, and its weights must not be drawn anew.

A state dict is checked as a whole before any of it is loaded, and the first forward pass verifies once that the
weights are still those that were scaled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.scaling.masks.gates import SUFFIX, gates_in, owner_and_name
from sparing.scaling.masks.mask_set import MASKS, Masks
from sparing.scaling.masks.sharded import part
from sparing.scaling.model.adapters import only_adapters
from sparing.scaling.model.multipliers import HIDDEN, SLOTS, attach_
from sparing.scaling.plans.planning import Plan

PLAN_HASH = "scaling_plan"  # buffer of the model with the hash of its plan: 32 bytes
_GUARDS = "_sparing_scaling_guards"
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks")


def hash_plan(plan: Plan) -> Tensor:
    """Hash what a checkpoint depends on: rule, roles and ratios, not densities; 32 bytes, uint8."""
    lines = [(name, e.role, tuple(e.shape), e.m_in, e.m_out) for name, e in sorted(plan.entries.items())]
    # factors that were on the queries of these attentions before 0.3 would mean another function
    moved = plan.attention != 1.0
    keys = sorted(name for name, e in plan.entries.items() if moved and e.hook.place == "key_input")
    text = repr((plan.rule, plan.optimizer, lines, keys) if keys else (plan.rule, plan.optimizer, lines))
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def check_checkpoint(root: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Refuse a state dict of another plan, or with missing masks or multipliers, or with weights off their masks."""
    _check_plan_hash(root, state, prefix)
    for path, module in root.named_modules():
        at = f"{prefix}{path}." if path else prefix  # names of wrapped children included
        for local, gate in gates_in(module).items():
            _check_mask(at + local, gate.mask, state)
        for slot in SLOTS:
            if slot in module._buffers and at + slot not in state:
                _refuse(at + slot, "no such key", "the model multiplies by this number")


def missing_buffers(
    root: nn.Module, state: Mapping[str, Any], prefix: str, suffix: str
) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and local name of buffers that a state dict has and the model does not have yet."""
    modules = dict(root.named_modules())
    for key in state:
        if key.startswith(prefix) and key.endswith(suffix):
            path, _, local = key[len(prefix) :].rpartition(".")
            if path in modules and local not in modules[path]._buffers:
                yield modules[path], local


def attach_guards_(root: nn.Module) -> None:
    """Hook a scaled model: loads are checked, and its first forward pass verifies the weights."""
    untyped = cast("Any", root)
    held = [
        untyped.register_load_state_dict_pre_hook(_before_load),
        untyped.register_load_state_dict_post_hook(_after_load),
        untyped.register_forward_pre_hook(_before_forward, prepend=True),
        untyped.register_state_dict_pre_hook(_before_save),
    ]
    root.__dict__[_GUARDS] = [handle.id for handle in held]


def detach_guards_(root: nn.Module) -> None:
    """Remove the guards, if there are any."""
    guards: list[int] = root.__dict__.pop(_GUARDS, [])
    for name in _HOOKS:
        for identity in guards:
            getattr(root, name).pop(identity, None)


def _before_load(root: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    masks: Masks = root.__dict__[MASKS]
    if only_adapters(root, state, prefix):
        return  # nothing of the scaled model is loaded
    # The plan first: a state dict of another one has nothing to add.
    _check_plan_hash(root, state, prefix)
    # A run whose masks changed has saved masks and factors that a freshly restored model does not have: add them first.
    hidden = {owner_and_name(root, e.name): e.name for e in masks.plan.entries.values() if e.role == "hidden"}
    for module, local in list(missing_buffers(root, state, prefix, SUFFIX)):
        masks.cover_(n for at, n in hidden.items() if at == (module, local.removesuffix(SUFFIX)))
    layers = {module for module, _ in hidden}
    for module, local in list(missing_buffers(root, state, prefix, "forward_scale")):
        if local == "forward_scale" and module in layers:
            attach_(module, "forward_scale", 1.0, where="input")
    check_checkpoint(root, state, prefix)


def _after_load(root: nn.Module, _: Any) -> None:
    masks: Masks = root.__dict__[MASKS]
    masks.accept_()
    masks.refresh_()


def _before_forward(root: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    masks: Masks = root.__dict__[MASKS]
    # Under functional_call tensors stand in for the weights, of which nothing is to be verified.
    held = (tensor for module in root.modules() for tensor in module._parameters.values() if tensor is not None)
    if masks.watched and all(isinstance(tensor, nn.Parameter) for tensor in held):
        masks.verify()
    for gate in masks.gates:
        if type(gate.module).__name__ in HIDDEN:  # its forward is never called, so no hook of its own undoes writes
            gate.settle_()


def _before_save(root: nn.Module, *_: Any) -> None:
    root.__dict__[MASKS].settle_()


def _check_plan_hash(root: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    key, present = prefix + PLAN_HASH, root._buffers[PLAN_HASH]
    if key not in state:
        _refuse(key, "no such key", "the checkpoint comes from a model that was not scaled")
    if not torch.equal(torch.as_tensor(state[key]).cpu(), present.cpu() if present is not None else torch.empty(0)):
        _refuse(key, "the mark of another plan", "its weights belong to other factors")


def _check_mask(key: str, present: Tensor, state: Mapping[str, Any]) -> None:
    if key + SUFFIX not in state:
        _refuse(key + SUFFIX, "no such key", "without its mask the layer would be another one")
    mask, weight = state[key + SUFFIX], state.get(key)
    if tuple(mask.shape) != tuple(present.shape) or mask.dtype != torch.bool:
        got, why = f"{mask.dtype} of shape {tuple(mask.shape)}", "the layer's mask is torch.bool of shape"
        _refuse(key + SUFFIX, got, f"{why} {tuple(present.shape)}")
    if (
        weight is not None
        and tuple(weight.shape) == tuple(mask.shape)
        and (live := int(part(weight)[~part(mask)].count_nonzero()))
    ):
        _refuse(key, f"{live} weights off the mask", "masked weights are zero")


def _refuse(key: str, got: str, why: str) -> None:
    do = (
        "load the state_dict of a model scaled by the same plan (save_pretrained writes a folded model); load dense "
        "weights before apply_, not after"
    )
    raise UserError(f"checkpoint: {key}", got=got, why=why, do=do)
