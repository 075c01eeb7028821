"""Apply a plan to a live model: initial weights are rescaled once, masks and multipliers attached."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.masks.gates import Gate, owner_and_name
from sparing.scaling.masks.laws import ConstantFanIn, Law, matrices, realised, stored
from sparing.scaling.masks.mask_set import MASKS, Masks
from sparing.scaling.masks.ranks import from_rank_zero
from sparing.scaling.model.adapters import watch_merges_
from sparing.scaling.model.attention import scale_attention_
from sparing.scaling.model.fold import attach_saving_, remove_
from sparing.scaling.model.loading import PLAN_HASH, attach_guards_, hash_plan
from sparing.scaling.model.multipliers import Slot, attach_
from sparing.scaling.plans.planning import APPLIED, Plan
from sparing.scaling.roles.structure import groups_of, modules_sharing_weight
from sparing.seeds import stream


def apply_(
    model: nn.Module, plan: Plan, *, seed: int = 0, masks: Law | None = None, redraw: float | None = None
) -> Masks:
    """Apply a plan to a freshly initialised model.

    Masks are drawn, initial weights are rescaled by the factors of the masks' realized densities and zeroed where they
    are masked; multipliers and the factor on attention logits are attached as hooks. If several processes train
    together, all get the masks of process 0, whatever their seeds (``DistributedDataParallel`` synchronizes the
    weights). A plan of another model, a model that was scaled before and a sharded one are refused; a refused model is
    unchanged.

    Args:
        model: The model of the plan, wrapped or not, on any device but meta.
        plan: What to do.
        seed: Seed of the masks, and of redrawn weights; their random streams are separate, so another density or law
            changes no weight that stays.
        masks: How live weights are chosen; ``ConstantFanIn()`` by default.
        redraw: Standard deviation σ of the base model: every weight that is hidden, an embedding or the readout is
            redrawn from N(0, σ²) times its factor. None rescales what the model has drawn.

    Returns:
        The masks, with the plan at their densities under ``plan``.
    """
    params = _require_fit(model, plan)
    law: Law = ConstantFanIn() if masks is None else masks
    drawn = _draw(submodule(model, ""), plan, law, seed)
    plan = plan.with_densities({name: realised(mask) for name, mask in drawn.items()})
    # Every factor is computed before a weight is touched: ``rescale`` refuses where the initialization is unknown.
    factors = {name: 1.0 if redraw is not None else entry.rescale for name, entry in plan.entries.items()}
    found = _attach_(model, plan, drawn)
    found.law = law
    with torch.no_grad():
        for name, parameter in params.items():
            if redraw is not None:
                entry = plan.entries[name]
                if entry.role in {"hidden", "embedding", "output"} and parameter.ndim > 1:  # vectors stay
                    fresh = torch.randn(parameter.shape, generator=stream(seed, "init", name), dtype=torch.float32)
                    parameter.copy_(fresh * (redraw * entry.factors.std))
                owner, local = owner_and_name(submodule(model, ""), name)
                if local == "weight" and getattr(owner, "padding_idx", None) is not None:
                    # no gradient would ever bring the padding row back to zero
                    parameter[owner.padding_idx] = 0  # type: ignore[index]
            if factors[name] != 1.0:
                parameter.mul_(factors[name])
    found.zero_()
    found.watch_()
    return found


def restore_(model: nn.Module, plan: Plan) -> Masks:
    """Prepare a freshly built model for the state dict of a scaled one: hooks and buffers are added, weights unchanged.

    Call ``load_state_dict`` next; until then masks are full, and multipliers those of the plan.

    Args:
        model: The model of the plan.
        plan: The plan of the saved model, at requested or at realised densities.

    Returns:
        The masks, which loading fills.
    """
    params = _require_fit(model, plan)
    full = {n: torch.ones_like(params[n], dtype=torch.bool) for n, entry in plan.entries.items() if entry.masked}
    return _attach_(model, plan, full)


def _attach_(model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]) -> Masks:
    """Attach everything but weights; a refusal on the way leaves nothing behind."""
    root = submodule(model, "")
    # Multipliers and attention may refuse after gates are in place: nothing half attached may stay.
    try:
        gates = {name: Gate(*owner_and_name(root, name), mask) for name, mask in masks.items()}
        _attach_multipliers_(root, plan)
        scale_attention_(root, plan.entries.values(), plan.attention)
    except UserError:
        remove_(root)
        raise
    root.register_buffer(PLAN_HASH, hash_plan(plan))
    found = Masks(root, plan, gates)
    root.__dict__[MASKS], root.__dict__[APPLIED] = found, plan
    attach_guards_(root)
    attach_saving_(root)
    watch_merges_(root)
    return found


def _attach_multipliers_(root: nn.Module, plan: Plan) -> None:
    """Attach factors, also to other layers that share a planned weight."""
    looked_up = {entry.module for entry in plan.entries.values() if entry.role == "embedding"}
    for path, factor in plan.inputs.items():
        for layer in modules_sharing_weight(root, path):
            attach_(layer, "forward_scale", factor, where="input")
    for path, factor in plan.outputs.items():
        slot: Slot = "forward_scale" if path in looked_up else "branch_scale"
        for layer in modules_sharing_weight(root, path):
            attach_(layer, slot, factor, where="output")


def _require_fit(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Refuse models that the plan does not fit, that were scaled before, or whose weights are out of reach."""
    for path, module in submodule(model, "").named_modules():
        if MASKS in module.__dict__ or PLAN_HASH in module._buffers:
            got = f"a model that was scaled before{f' (its part {path})' if path else ''}"
            do = "build the model afresh; for new densities make one plan with all of them"
            raise UserError("apply_", got=got, why="a second factor would multiply the first", do=do)
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
        do = "call apply_ on the whole model with its weights, then fully_shard, then masks.shard_()"
        raise UserError("model", got=got, why="masks and factors need the weights themselves", do=do)
    return params


def _draw(root: nn.Module, plan: Plan, law: Law, seed: int) -> dict[str, Tensor]:
    """Draw the masks of all processes, each on its parameter's device; a mask without live weights is refused."""
    drawn = {}
    for name, entry in plan.entries.items():
        if entry.masked:
            # The outputs of a grouped convolution are rows already, unless inputs are first.
            groups = groups_of(owner_and_name(root, name)[0]) if entry.transposed else 1
            kind = {"transposed": entry.transposed, "stacked": entry.stacked}
            like = torch.empty(entry.shape, device="meta")
            count, *shape = matrices(like, groups=groups, **kind).shape  # laws draw (fan_out, fan_in, ...)
            # Each matrix of a stack is a layer of its own, and so is each group.
            names = [f"{name}.{at}" for at in range(count)] if entry.stacked or groups > 1 else [name]
            masks = [law.draw(shape, entry.density, seed=seed, name=one) for one in names]
            drawn[name] = stored(torch.stack(masks), **kind)
    # Broadcast on the parameter's device: NCCL moves no CPU tensors.
    params = named_parameters(root)
    drawn = {name: from_rank_zero(mask.to(params[name].device)) for name, mask in drawn.items()}
    if dead := [name for name, mask in drawn.items() if not bool(mask.any())]:
        do = "raise the density, or draw exact counts"
        raise UserError(dead[0], got="a mask without live weights", why="the layer would pass nothing on", do=do)
    return drawn
