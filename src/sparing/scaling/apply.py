"""The file that changes live models: initial weights are rescaled once, masks and multipliers put in place.

chosen = plan(model, base=256, density=1 / 16)
masks = apply_(model, chosen, seed=0)
optimizer = torch.optim.AdamW(chosen.groups(model, lr=2**-6))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.attention import scale_attention_, unscale_attention_
from sparing.scaling.entries import Entry
from sparing.scaling.gates import Gate, gates_in, place, sharers
from sparing.scaling.live import MASKS, Masks
from sparing.scaling.loading import FINGERPRINT, attach_guards_, detach_guards_, fingerprint
from sparing.scaling.masks import ConstantFanIn, Law, oriented, realised
from sparing.scaling.multipliers import SLOTS, Slot, attach_, detach_
from sparing.scaling.plan import APPLIED, Plan
from sparing.scaling.saving import attach_saving_, detach_saving_
from sparing.seeds import stream

__all__ = ["Masks", "apply_", "masks_of", "remove_", "restore_"]


def apply_(
    model: nn.Module, plan: Plan, *, seed: int = 0, masks: Law | None = None, redraw: float | None = None
) -> Masks:
    """Make a freshly initialised model what the plan says.

    Masks are drawn, initial weights rescaled by the factors of the densities that the masks have in truth, and put to
    zero where they are masked; multipliers and the factor on attention logits are hooked in. Where several processes
    train together, all get the masks of process 0, whatever seed each was given
    (their weights are the business of ``DistributedDataParallel``). It is refused if the plan
    is of another model, if the model was scaled before, or if it is sharded; a refused model is as it was.

    Args:
        model: The model of the plan, wrapped or not, on any device but meta.
        plan: What to do.
        seed: Of the masks, and of the weights where they are drawn anew; streams of their own, so another density or
            law changes no weight that stays.
        masks: How live weights are chosen; ``ConstantFanIn()`` by default.
        redraw: Standard deviation σ of the base model: every weight that is hidden, an embedding or the readout is
            drawn anew from N(0, σ²) times its factor. None rescales what the model has drawn.

    Returns:
        The masks, with the plan at their densities under ``plan``.
    """
    law = ConstantFanIn() if masks is None else masks
    params = _require_fit(model, plan)
    drawn = {name: _draw(entry, law, seed) for name, entry in plan.entries.items() if entry.masked}
    drawn = {name: _from_first(mask.to(params[name].device)) for name, mask in drawn.items()}
    plan = plan.with_densities({name: _require_live(name, mask) for name, mask in drawn.items()})
    factors = {name: 1.0 if redraw is not None else entry.rescale for name, entry in plan.entries.items()}
    found = _attach_(model, plan, drawn)
    with torch.no_grad():
        for name, parameter in params.items():
            if redraw is not None:
                _redraw_(parameter, plan.entries[name], redraw, seed)
                _clear_padding_(*place(submodule(model, ""), name))
            if factors[name] != 1.0:
                parameter.mul_(factors[name])
    found.zero_()
    found.watch_()
    return found


def restore_(model: nn.Module, plan: Plan) -> Masks:
    """Prepare a freshly built model for the state dict of a scaled one: hooks and buffers, no weight is touched.

    Call ``load_state_dict`` next; until then masks are full, and multipliers those of the plan.

    Args:
        model: The model of the plan.
        plan: The plan of the saved model, at asked or at realised densities.

    Returns:
        The masks, which loading fills.
    """
    params = _require_fit(model, plan)
    full = {n: torch.ones_like(params[n], dtype=torch.bool) for n, entry in plan.entries.items() if entry.masked}
    return _attach_(model, plan, full)


def masks_of(model: nn.Module) -> Masks:
    """Return the masks of a scaled model, such as a copy of one."""
    found = submodule(model, "").__dict__.get(MASKS)
    if not isinstance(found, Masks):
        raise UserError("model", got="no masks", why="it was not scaled", do="call apply_ or restore_ first")
    return found


def remove_(model: nn.Module) -> None:
    """Take all hooks, buffers and marks off a scaled model; weights stay as they are, multipliers are lost."""
    root = submodule(model, "")
    for module in root.modules():
        for slot in SLOTS:
            detach_(module, slot)
        for gate in gates_in(module).values():
            gate.remove_()
    unscale_attention_(root)
    detach_guards_(root)
    detach_saving_(root)
    root._buffers.pop(FINGERPRINT, None)
    for mark in (MASKS, APPLIED):
        root.__dict__.pop(mark, None)


def _attach_(model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]) -> Masks:
    """Put everything but weights in place; a refusal on the way leaves nothing behind."""
    root = submodule(model, "")
    try:
        gates = {name: Gate(*place(root, name), mask) for name, mask in masks.items()}
        _attach_multipliers_(root, plan)
        scale_attention_(root, plan.entries.values(), plan.attention)
    except UserError:
        remove_(root)
        raise
    root.register_buffer(FINGERPRINT, fingerprint(plan))
    found = Masks(root, plan, gates)
    root.__dict__[MASKS], root.__dict__[APPLIED] = found, plan
    attach_guards_(root)
    attach_saving_(root)
    return found


def _attach_multipliers_(root: nn.Module, plan: Plan) -> None:
    """Hook factors in, also on other layers that share the weight of a planned one."""
    looked_up = {entry.module for entry in plan.entries.values() if entry.role == "embedding"}
    for path, factor in plan.inputs.items():
        for layer in sharers(root, path):
            attach_(layer, "forward_scale", factor, where="input")
    for path, factor in plan.outputs.items():
        slot: Slot = "forward_scale" if path in looked_up else "branch_scale"
        for layer in sharers(root, path):
            attach_(layer, slot, factor, where="output")


def _require_fit(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Refuse models that the plan is not of, that were scaled before, or that cannot be."""
    _require_untouched(model)
    params = named_parameters(model)
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    planned = {name: tuple(entry.shape) for name, entry in plan.entries.items()}
    if shapes != planned:
        odd = sorted(n for n in shapes.keys() | planned.keys() if shapes.get(n) != planned.get(n))
        got = f"{odd[0]} {shapes.get(odd[0], 'missing')} where the plan has {planned.get(odd[0], 'nothing')}"
        raise UserError("plan", got=got, why="it is of another model", do="plan again after the last change of layers")
    odd = [name for name, p in params.items() if p.is_meta or hasattr(p, "device_mesh")]
    if odd:
        got = f"{odd[0]} {'on the meta device' if params[odd[0]].is_meta else 'sharded'}"
        do = "call apply_ on the whole model with its weights; fully_shard after it loses the masks' hooks"
        raise UserError("model", got=got, why="masks and factors need the weights themselves", do=do)
    return params


def _require_untouched(model: nn.Module) -> None:
    for path, module in submodule(model, "").named_modules():
        if MASKS in module.__dict__ or FINGERPRINT in module._buffers:
            raise UserError(
                "apply_",
                got=f"a model that was scaled before{f' (its part {path})' if path else ''}",
                why="a second factor would multiply the first",
                do="build the model afresh; for new densities make one plan with all of them",
            )


def _require_live(name: str, mask: Tensor) -> float:
    if not bool(mask.any()):
        do = "raise the density, or draw exact counts"
        raise UserError(name, got="a mask without live weights", why="the layer would pass nothing on", do=do)
    return realised(mask)


def _draw(entry: Entry, law: Law, seed: int) -> Tensor:
    shape = _turned(entry.shape) if entry.transposed else tuple(entry.shape)
    mask = law.draw(shape, entry.density, seed=seed, name=entry.name)
    return oriented(mask, transposed=entry.transposed)


def _turned(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[1], shape[0], *shape[2:])


def _redraw_(parameter: nn.Parameter, entry: Entry, std: float, seed: int) -> None:
    """Draw a weight of the base's scale times its factor; vectors and what is no weight stay."""
    if entry.role in {"hidden", "embedding", "output"} and parameter.ndim > 1:
        fresh = torch.randn(parameter.shape, generator=stream(seed, "init", entry.name), dtype=torch.float32)
        parameter.copy_(fresh * (std * entry.factors.std))


def _clear_padding_(module: nn.Module, local: str) -> None:
    """Keep the row of padding at zero: no gradient would ever change it."""
    row = getattr(module, "padding_idx", None)
    if local == "weight" and row is not None:
        module.get_parameter(local)[row] = 0


def _from_first(tensor: Any) -> Any:
    """Return the tensor of process 0 in every process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return tensor
    sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.clone()
    dist.broadcast(sent.contiguous(), src=0)
    return sent.to(tensor.dtype)
