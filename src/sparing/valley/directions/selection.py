"""Which parameters move: groups by kind, by block or by name; where filters lie; which weights are masked.

Blocks come from ``find_blocks``. Where it finds none, or single layers only (a plain CNN or MLP), the layers of the
model in order of registration stand in: each module that holds a matrix opens one, and modules that hold vectors only,
such as a batch norm, belong to the layer before them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from sparing.blocks import Block, find_blocks, named_parameters, submodule, tied
from sparing.blocks.names import walk
from sparing.errors import UserError, require
from sparing.valley.directions.config import Group, GroupKind
from sparing.valley.directions.norms import Layout

# Masked are weights with a zero in their mask buffer; with "zeros" also exact zeros of matrices with over 1 % of them
MaskPolicy = Literal["zeros", "buffers"]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TRANSPOSED = _CONVS[3:]
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_PRUNED = 0.01  # share of exact zeros: rounding never leaves that many in a trained matrix, pruning always does


@dataclass(frozen=True, slots=True)
class Section:
    """A named part of a model: a block or a layer."""

    name: str  # path of the block or layer; the role itself outside the repeated blocks
    role: str  # role of a block, or ``layer`` where layers in order stand in for blocks
    params: tuple[str, ...]  # canonical parameter names, in order of registration


def sections(model: nn.Module) -> list[Section]:
    """Partition a model's parameters into blocks in order of use, or into layers where no block has several layers."""
    try:
        found = find_blocks(model)
    except UserError:  # no repeated blocks, or several kinds: only the order of layers is left
        return _layer_sections(model)
    if all(_is_layer(block) for block in found if block.role == "body"):
        return _layer_sections(model)
    return [Section(block.name, block.role, tuple(block.params)) for block in found]


def selected(model: nn.Module, group: Group) -> tuple[str, ...]:
    """Return the canonical names that a group moves, in order of registration; an empty group is refused.

    - "all": every one. "features": all but the classifier.
    - "classifier": the head that ``find_blocks`` finds, else the last registered module that holds a matrix, if it
      is not one of the repeated blocks. Where it shares its weight with the embedding, that weight is the classifier.
    - "first": what comes before the body and its first block, or the whole first stage where the body has stages (stem
      and layer1 of a ResNet); of a model without blocks the first layer and its norm.
    - "conv": all parameters of convolutions. "norm": those of torch's normalisations, and of modules that have "norm"
      in the name of their class and hold vectors only.
    - A tuple: each entry is a parameter's name, a module's path, a block's name or a role (embed, body, tail, head).

    A frozen parameter moves only if the tuple names it. A tied one is listed once, under its first name, and is found
    by all of them. Tensors that are not floating never move.
    """
    params, aliases = named_parameters(model), tied(model)
    chosen = set(_group_by_kind(model, group) if isinstance(group, str) else _group_by_name(model, group))
    named = set() if isinstance(group, str) else {aliases.get(entry, entry) for entry in group}
    moving = {n for n, p in params.items() if p.is_floating_point() and (p.requires_grad or n in named)}
    found = tuple(name for name in params if name in chosen & moving)
    if not found:
        kinds = [
            f"{kind} ({n})" for kind in get_args(GroupKind) if (n := len(moving & set(_group_by_kind(model, kind))))
        ]
        why = f"{len(chosen)} parameters are in it and none of them may move"
        do = f"thaw or name them, or take one of {', '.join(kinds)}" if kinds else "thaw parameters, or name them"
        raise UserError("group", got=f"{group!r}, which is empty", why=why, do=do)
    return found


def section_names(model: nn.Module) -> dict[str, str]:
    """Return the name of the block or layer of every parameter."""
    return {name: section.name for section in sections(model) for name in section.params}


def filter_layouts(model: nn.Module) -> dict[str, Layout]:
    """Return the layouts of weights whose outputs are not the first dimension."""
    names = _names_by_id(model)
    found: dict[str, Layout] = {}
    for place in walk(model):
        module, weight = place.module, place.module._parameters.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        if isinstance(module, _TRANSPOSED):
            found.setdefault(names[id(weight)], Layout(transposed=True, groups=module.groups))
        elif type(module).__name__ == "Conv1D" and not isinstance(module, _CONVS):  # Hugging Face's, (inputs, outputs)
            found.setdefault(names[id(weight)], Layout(transposed=True))
    return found


def live_masks(model: nn.Module, names: Iterable[str], *, masks: MaskPolicy = "zeros") -> dict[str, Tensor]:
    """Return boolean masks, True where live, of every weight that has masked entries.

    A mask is a buffer of the parameter's shape beside it, ``weight_mask`` for ``weight`` (sparse training) or for
    ``weight_orig`` (``torch.nn.utils.prune``). Checkpoints of pruned models may have lost it and kept the zeros: with
    "zeros" a matrix with more than 1 % exact zeros is masked where it is zero. Training leaves no such share by chance;
    a matrix of zeros only was never trained and has no mask.
    """
    require(masks in get_args(MaskPolicy), "masks", repr(masks), "no such policy", 'pass "zeros" or "buffers"')
    params = named_parameters(model)
    found = {}
    for name in names:
        value = params[name].detach()
        path, _, local = name.rpartition(".")
        mask = submodule(model, path)._buffers.get(local.removesuffix("_orig") + "_mask")
        zeros = value.numel() - int(value.count_nonzero())
        if mask is not None and mask.shape == value.shape:
            found[name] = mask != 0
        elif masks == "zeros" and value.ndim > 1 and _PRUNED * value.numel() < zeros < value.numel():
            found[name] = value != 0
    return found


def _names_by_id(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in named_parameters(model).items()}


def _is_layer(block: Block) -> bool:
    """Whether a block is one layer: no module in it, at most one matrix."""
    nested = any("." in name.removeprefix(f"{block.name}.") for name in block.params)
    return not nested and sum(p.ndim > 1 for p in block.params.values()) < 2


def _layer_sections(model: nn.Module) -> list[Section]:
    names, taken = _names_by_id(model), set[str]()
    gathered: list[tuple[str, list[str]]] = []
    early: list[str] = []  # vectors before the first matrix belong to its layer
    for place in walk(model):
        held = {names[id(p)]: p.ndim for p in place.module._parameters.values() if p is not None}
        fresh = [name for name in held if name not in taken]
        taken.update(fresh)
        if fresh and any(held[name] > 1 for name in fresh):
            gathered.append((place.path or "(model)", early + fresh))
            early = []
        elif gathered:
            gathered[-1][1].extend(fresh)
        else:
            early += fresh
    if early:
        gathered.append(("(model)", early))
    return [Section(path, "layer", tuple(params)) for path, params in gathered]


def _group_by_kind(model: nn.Module, kind: str) -> list[str]:
    match kind:
        case "classifier":
            return _classifier(model)
        case "features":
            head = set(_classifier(model))
            return [name for name in named_parameters(model) if name not in head]
        case "first":
            return _first(sections(model))
        case "conv":
            return _parameters_of(model, [m for m in model.modules() if isinstance(m, _CONVS)])
        case "norm":
            return _parameters_of(model, [m for m in model.modules() if _is_norm(m)])
        case _:
            return list(named_parameters(model))


def _group_by_name(model: nn.Module, group: tuple[str, ...]) -> list[str]:
    every, parts = {**{n: n for n in named_parameters(model)}, **tied(model)}, sections(model)
    found: list[str] = []
    for entry in group:
        inner = [owner for name, owner in every.items() if name == entry or name.startswith(f"{entry}.")]
        inner += [name for part in parts if entry in (part.name, part.role) for name in part.params]
        if not inner:
            known = ", ".join(dict.fromkeys(part.name for part in parts))
            why = "no parameter, module or block has that name"
            raise UserError("group", got=repr(entry), why=why, do=f"name a parameter, a module, or one of {known}")
        found += inner
    return found


def _classifier(model: nn.Module) -> list[str]:
    parts = sections(model)
    if head := [name for part in parts if part.role == "head" for name in part.params]:
        return head
    names = _names_by_id(model)
    direct = [[p for p in place.module._parameters.values() if p is not None] for place in walk(model)]
    last = next((held for held in reversed(direct) if any(p.ndim > 1 for p in held)), [])
    found = [names[id(p)] for p in last]
    body = {name for part in parts if part.role == "body" for name in part.params}
    # A model that ends in its blocks has no classifier
    return [] if body & set(found) else found


def _first(parts: list[Section]) -> list[str]:
    body = [part for part in parts if part.role == "body"]
    if not body:
        return list(parts[0].params) if parts else []
    # Blocks of one parent are a stage: "first" is then the whole first one
    stages = [part.name.rpartition(".")[0] for part in body]
    count = stages.count(stages[0]) if len(set(stages)) > 1 else 1
    return [name for part in [p for p in parts if p.role == "embed"] + body[:count] for name in part.params]


def _parameters_of(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    names = _names_by_id(model)
    return list(dict.fromkeys(names[id(p)] for module in modules for p in module.parameters()))


def _is_norm(module: nn.Module) -> bool:
    held = list(module.parameters())
    called = "norm" in type(module).__name__.lower() and all(p.ndim < 2 for p in held)
    return bool(held) and (isinstance(module, _NORMS) or called)
