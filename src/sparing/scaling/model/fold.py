"""Export: every multiplier is folded into weights, which leaves an ordinary model.

A tied table E both looks up, times α, and reads out, on inputs times c. With E' = α E the lookup is right, and so is
the readout once the gain of the final norm, if nothing else reads it, has taken over a factor c/α on its inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.blocks import named_parameters, submodule, tied
from sparing.errors import UserError, require
from sparing.scaling.masks.gates import gates_in
from sparing.scaling.masks.mask_set import MASKS, Masks, masks_of
from sparing.scaling.masks.sharded import is_sharded
from sparing.scaling.model.adapters import adapted
from sparing.scaling.model.attention import attentions, original_scaling, query_rows, unscale_attention_
from sparing.scaling.model.loading import PLAN_HASH, detach_guards_
from sparing.scaling.model.multipliers import SLOTS, Slot, Where, active_slots, detach_, factor_of
from sparing.scaling.plans.planning import APPLIED, Plan
from sparing.scaling.roles.structure import is_embedding, is_transposed
from sparing.scaling.sparse.cuda import revert_cuda_


@torch.no_grad()
def fold_(model: nn.Module, masks: Masks | Plan | None = None, *, untie: bool = False) -> nn.Module:
    """Fold all multipliers into the weights and remove hooks, buffers and marks.

    The model then computes the same to rounding, has the keys its author gave it, and passes through
    ``save_pretrained`` and ``from_pretrained``. Masked weights are exact zeros: ``live_weights`` finds the masks again.
    Fold at the end of training: factors on learning rates do not apply to folded weights, and a weight that has just
    been grown, and is zero, looks masked.

    Args:
        model: A scaled model, wrapped or not.
        masks: What ``apply_`` returned, or the plan; neither is needed, both are accepted for clarity of the call.
        untie: Give a tied readout weights of its own, where no norm can absorb its factor.

    Returns:
        The same model.

    Raises:
        UserError: If the model was not scaled, has factors as well as adapters (peft), or a tied weight has factors
            that it cannot hold and no norm can absorb; nothing was changed then.
    """
    root, found = submodule(model, ""), masks_of(model)
    _require_whole(root)
    _require_bare(root, found.plan)
    # Whatever can refuse comes before the first weight is changed.
    for one in attentions(root, found.plan.entries.values()):
        if one.packed and original_scaling(one.module) is not None:
            query_rows(one)
    ends = _ends(root, found.plan)
    _require_held_once(root, found.plan, ends)
    _require_scalable(root, found.plan)
    for users in _shared_tables(root):
        _fold_tied_(root, users, found.plan, untie=untie)
    _fold_attention_(root, found.plan)
    for module in list(root.modules()):
        for slot, where in active_slots(module).items():
            _fold_slot_(module, slot, where, factor_of(module, slot), ends)
    remove_(root)
    return model


def remove_(model: nn.Module) -> None:
    """Take all hooks, buffers and marks off a scaled model; weights stay as they are, multipliers are lost."""
    root = submodule(model, "")
    for module in root.modules():
        for slot in SLOTS:
            detach_(module, slot)
        for gate in gates_in(module).values():
            gate.remove_()
    revert_cuda_(root)
    unscale_attention_(root)
    detach_guards_(root)
    root._buffers.pop(PLAN_HASH, None)
    for mark in (MASKS, APPLIED, "save_pretrained"):  # the last hides the class's own method
        root.__dict__.pop(mark, None)


def attach_saving_(root: nn.Module) -> None:
    """Make a transformers model save itself folded, until ``remove_``; other models stay as they are."""
    if callable(getattr(type(root), "save_pretrained", None)):
        # A partial of the model, not a closure: copies and pickles of the model then save themselves.
        root.__dict__["save_pretrained"] = partial(_save_folded, root)


def _save_folded(
    root: Any, save_directory: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """Save a folded copy, untied where it must be; the model trains on, with its masks and multipliers."""
    # Plain transformers would drop masks and multipliers, and the file would hold another function.
    _require_whole(root)
    twin = copy.deepcopy(root)
    if state_dict is not None:
        twin.load_state_dict(state_dict)
    folded: Any = fold_(twin, untie=True)
    return folded.save_pretrained(save_directory, *args, **options)


def _require_whole(root: nn.Module) -> None:
    cut = next((name for name, parameter in named_parameters(root).items() if is_sharded(parameter)), None)
    if cut is not None:
        gather = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        do = f"load {gather} into a whole model (restore_)"
        raise UserError("model", got=f"{cut} as a DTensor", why="a process holds a part of it", do=do)


def _require_bare(root: nn.Module, plan: Plan) -> None:
    """Refuse to fold a factor where adapters lie beside layers: it would leave them as they are."""
    factors = [factor_of(module, slot) for module in root.modules() for slot in active_slots(module)]
    factor = next((factor for factor in (*factors, plan.attention) if factor != 1), None)
    if factor is not None and any(True for _ in adapted(root)):
        got, why = f"adapters in a model with the factor {factor:g}", "a factor in a weight would not reach them"
        raise UserError("fold_", got=got, why=why, do="take them out (unload), fold, and make adapters anew")


def live_weights(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Find the masks of a folded or reloaded model by its exact zeros: canonical name -> boolean mask."""
    params = named_parameters(model)
    return {name: params[name].detach() != 0 for name, entry in plan.entries.items() if entry.masked}


def _ends(root: nn.Module, plan: Plan) -> set[int]:
    """Return the ids of the parameters that end residual branches."""
    return {id(p) for name, p in named_parameters(root).items() if name in plan.entries and plan.entries[name].residual}


def _held(module: nn.Module, ends: Collection[int] = (), *, output: bool) -> str:
    """Return the name of the one matrix into which a factor on a module's input or output folds; refuse others."""
    params = {name: p for name, p in module._parameters.items() if p is not None}
    matrices = [name for name, p in params.items() if name == "weight" or p.ndim > 1]
    chosen = [name for name in matrices if len(matrices) == 1 or name == "weight" or id(params[name]) in ends]
    # Beside one matrix any other parameter of a module that nobody knows may be a gain, which must stay.
    known = {"bias", *chosen, *(f"{name}_bias" for name in chosen)}
    odd = [name for name in params if output and len(matrices) == 1 and name not in known]
    got = f"{type(module).__name__} with {', '.join(params) or 'no parameters of its own'}"
    why = "its factor has no one matrix to fold into"
    require(len(chosen) == 1 and not odd, "fold_", got, why, "hold one matrix and its bias in a module of their own")
    return chosen[0]


def _require_held_once(root: nn.Module, plan: Plan, ends: Collection[int]) -> None:
    """Refuse factors that no matrix can hold, and two of them on one matrix."""
    shared = {id(submodule(root, path)) for users in _shared_tables(root) for path in users}
    taken: dict[int, str] = {}
    for path, module in root.named_modules():
        for slot, where in active_slots(module).items():
            if isinstance(module, nn.MultiheadAttention) or where == "query_rows":
                continue
            name = _held(module, ends, output=where != "input")
            before = taken.setdefault(id(module._parameters[name]), path)
            got = f"{before} and {path} with one weight, called {name} here"
            why, do = "it cannot hold two factors", "call it weight in both, as torch's layers do"
            require(before == path or id(module) in shared, f"fold_: {slot}", got, why, do)
    for one in attentions(root, plan.entries.values()):
        if original_scaling(one.module) is not None and one.norm is None:
            _held(one.projection, output=True)


def _fold_slot_(module: nn.Module, slot: Slot, where: Where, factor: float, ends: Collection[int]) -> None:
    """Fold one factor into the module's own parameters."""
    params = module._parameters
    if where == "input":
        module.get_parameter(_held(module, ends, output=False)).mul_(factor)
    elif where == "key_input":
        packed = params["in_proj_weight"]
        weight = cast("Tensor", params["k_proj_weight"] if packed is None else packed.chunk(3)[1])
        weight.mul_(factor)
    elif where == "query_rows":
        weight = module.get_parameter("weight")
        _scale_outputs_(module, factor, weight.shape[1 if is_transposed(module) else 0] // 3)
    elif isinstance(module, nn.MultiheadAttention):
        _scale_outputs_(module.out_proj, factor)
    elif slot == "query_scale" and (gain := params.get("weight")) is not None and gain.ndim == 1:
        _scale_norm_(module, factor)
    else:
        _scale_outputs_(module, factor, ends=ends)
    _set_one_(module, slot)


def _shared_tables(root: nn.Module) -> list[list[str]]:
    """Return, for each weight that several modules share, their paths."""
    users: dict[str, list[str]] = {}
    for alias, owner in tied(root).items():
        users.setdefault(owner, [owner]).append(alias)
    paths = [[name.rpartition(".")[0] for name in names if name.endswith(".weight")] for names in users.values()]
    modules = [{id(submodule(root, path)): path for path in row} for row in paths]
    # One module may be registered under several names: it counts once.
    return [list(row.values()) for row in modules if len(row) > 1]


def _fold_tied_(root: nn.Module, users: list[str], plan: Plan, *, untie: bool) -> None:
    """Fold the factors of a weight that several modules share, or untie it."""
    layers = [submodule(root, path) for path in users]
    lookups = {factor_of(layer, "forward_scale") for layer in layers if is_embedding(layer)}
    readers = {factor_of(layer, "forward_scale") for layer in layers if not is_embedding(layer)}
    table, head = layers[0].get_parameter("weight"), submodule(root, plan.readout)
    norm = plan.readout_norm if any(p is table for p in head._parameters.values()) else ""
    if _fold_table_(table, lookups, readers, submodule(root, norm) if norm else None):
        for layer in layers:
            _set_one_(layer, "forward_scale")
    elif untie:
        for layer in layers[1:]:
            layer.register_parameter("weight", nn.Parameter(layer.get_parameter("weight").detach().clone()))
        if (config := getattr(root, "config", None)) is not None:
            config.tie_word_embeddings = False
    else:
        got = f"one tied weight with factors {sorted(lookups)} where it is looked up and {sorted(readers)} elsewhere"
        why = "it cannot hold both, and no norm that the readout alone reads can take their ratio"
        do = "pass untie=True: each gets a weight of its own"
        raise UserError(f"fold_: {', '.join(users)}", got=got, why=why, do=do)


def _fold_table_(table: Tensor, lookups: set[float], readers: set[float], norm: nn.Module | None) -> bool:
    """Fold the factors of one table and return True; False, and nothing changed, where one table cannot hold them."""
    if len(lookups) > 1 or len(readers) > 1:
        return False
    lookup, reader = next(iter(lookups), None), next(iter(readers), None)
    ratio = 1.0 if lookup is None or reader is None else reader / lookup
    if ratio != 1 and (norm is None or not _scale_norm_(norm, ratio)):
        return False
    table.mul_(reader if lookup is None else lookup)  # type: ignore[arg-type]
    return True


def _scale_norm_(norm: nn.Module, factor: float) -> bool:
    """Multiply the output of a norm by a factor; False if its gain is neither w nor 1 + w."""
    scaled = _scaled(norm, factor)
    for name, value in (scaled or {}).items():
        norm.get_parameter(name).copy_(value)
    return scaled is not None


def _scaled(norm: nn.Module, factor: float) -> dict[str, Tensor] | None:
    """Gain and bias by which a norm's output is a factor larger, checked on numbers; None if neither formula fits."""
    # Tried on numbers, because norms of other authors have the same names and other formulas; in single precision at
    # least, for another formula may differ by less than half precision shows.
    tensors = dict([*norm.named_parameters(), *norm.named_buffers()])
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    held = {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in floats.items()}
    gain = held["weight"]
    probe = torch.linspace(-2, 3, 4 * gain.numel(), dtype=gain.dtype, device=gain.device).view(4, -1).sin()
    expected = functional_call(norm, held, probe) * factor
    for offset in (0.0, 1.0):  # 1 + w is Gemma's
        tried = {name: held[name] * factor for name in ("weight", "bias") if norm._parameters.get(name) is not None}
        tried["weight"] = (gain + offset) * factor - offset
        found = functional_call(norm, held | tried, probe)
        if torch.allclose(found, expected, rtol=16 * torch.finfo(gain.dtype).eps, atol=1e-6):
            return tried
    return None


def _require_scalable(root: nn.Module, plan: Plan) -> None:
    """Refuse norms of queries that cannot take the factor of their attention."""
    norms = [(one.norm, plan.attention) for one in attentions(root, plan.entries.values())
             if one.norm is not None and original_scaling(one.module) is not None]  # fmt: skip
    for module in root.modules():
        gain = module._parameters.get("weight")
        if "query_scale" in active_slots(module) and gain is not None and gain.ndim == 1:
            norms.append((module, factor_of(module, "query_scale")))
    odd = next((norm for norm, factor in norms if _scaled(norm, factor) is None), None)
    why, do = "its gain is neither w nor 1 + w", "keep the factors: save the state dict beside the plan"
    require(odd is None, "fold_", f"a norm of queries, {type(odd).__name__}", why, do)


def _fold_attention_(root: nn.Module, plan: Plan) -> None:
    """Fold the factor on ``scaling`` attributes into the queries; ``remove_`` gives the attributes back."""
    for one in attentions(root, plan.entries.values()):
        if original_scaling(one.module) is None:
            continue
        if one.norm is not None:
            _scale_norm_(one.norm, plan.attention)
        elif one.packed:
            _scale_outputs_(one.projection, plan.attention, query_rows(one)[0])
        else:
            _scale_outputs_(one.projection, plan.attention)


def _scale_outputs_(module: nn.Module, factor: float, count: int | None = None, *, ends: Collection[int] = ()) -> None:
    """Multiply weight and bias, or those of the first ``count`` outputs of a packed projection."""
    name = _held(module, ends, output=True)
    weight = module.get_parameter(name)
    (weight[:, :count] if count is not None and is_transposed(module) else weight[:count]).mul_(factor)
    for bias in (module._parameters.get("bias"), module._parameters.get(f"{name}_bias")):
        if bias is not None:
            bias[:count].mul_(factor)


def _set_one_(module: nn.Module, slot: Slot) -> None:
    if slot in module._buffers:
        cast("Tensor", module._buffers[slot]).fill_(1.0)
