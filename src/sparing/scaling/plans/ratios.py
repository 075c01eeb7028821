"""Parameter groups from a plan's factors, and checks that their learning rates keep the plan's ratios."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.groups import bind, groups_of, keep, override, scale
from sparing.scaling.plans.entries import Entry
from sparing.scaling.rules import Optimizer

_EXACT = 1e-6  # relative: rates that a scheduler multiplied by one number agree to rounding
_ROUNDING = 0.3  # relative: masks of whole rows miss a density by one live input in four at worst

_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop")
_KINDS = {"SGD": "sgd", "ASGD": "sgd", "Lion": "lion", "Muon": "muon"} | dict.fromkeys(_ADAM, "adam")
_DIVIDES_L2 = {
    torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop,
    torch.optim.Adagrad, torch.optim.Adadelta,
}  # fmt: skip
_NO_RULE = {
    "Adafactor": "its steps go with the size of the weights, of which the rule changes the scale",
    "LBFGS": "its steps are those of all weights together, at one rate",
}


def groups(
    entries: Mapping[str, Entry],
    kind: Optimizer,
    model: nn.Module,
    *,
    lr: float,
    names: Collection[str] | None = None,
    weight_decay: float = 0.0,
    rescales: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return parameter groups with every option scaled from the base's, by a rule that scales something or not."""
    params = named_parameters(model)
    _require_planned(entries, params, "model")
    _watch_rates()
    if kind == "adam":
        options.setdefault("eps", 1e-8)
    found = groups_of(model, lr=lr, weight_decay=weight_decay, **options)
    # Sparse layers hold their live weights in a vector, which ``groups_of`` takes for a bias that does not decay.
    values = [name for name, entry in entries.items() if len(entry.shape) > 1 and params[name].ndim == 1]
    if values:
        found = override(found, values, weight_decay=weight_decay)
    found = scale(found, {name: entry.factors.lr for name, entry in entries.items()})
    found = scale(found, {name: entry.factors.weight_decay for name, entry in entries.items()}, option="weight_decay")
    if "eps" in options:
        found = scale(found, {name: entry.factors.eps for name, entry in entries.items()}, option="eps")
    if any(entry.factors.lr != 1.0 for entry in entries.values()):
        found = override(found, list(entries), lr_kind=kind)
    for factor in {entry.factors.lr for entry in entries.values()}:
        found = override(found, [name for name, e in entries.items() if e.factors.lr == factor], lr_scale=factor)
    matrices = {name: e for name, e in entries.items() if e.role == "hidden" and len(e.shape) == 2}
    grown = {name: _muon_growth(e) for name, e in matrices.items() if kind == "muon" and rescales}
    for growth in set(grown.values()) - {(1.0, 1.0)}:
        found = override(found, [name for name, one in grown.items() if one == growth], muon_growth=growth)
    found = found if names is None else keep(found, names)
    order = {name: at for at, name in enumerate(entries)}
    return bind(sorted(found, key=lambda group: order[group.names[0]]), model)


def check(
    entries: Mapping[str, Entry], kind: Optimizer, optimizers: Sequence[torch.optim.Optimizer], *, rescales: bool = True
) -> None:
    """Refuse optimizers whose rates are not the plan's up to one factor; a rule that scales nothing allows L2."""
    names = [[_names(group, entries) for group in optimizer.param_groups] for optimizer in optimizers]
    _require_planned(entries, [name for rows in names for row in rows for name in row], "optimizer")
    for optimizer, rows in zip(optimizers, names, strict=True):
        _require_kind(kind, optimizer, rescales=rescales)
        _require_own_rates(optimizer)
        for group, row in zip(optimizer.param_groups, rows, strict=True):
            factor = group.get("lr_scale", 1.0)
            if far := [name for name in row if not math.isclose(entries[name].factors.lr, factor, rel_tol=_ROUNDING)]:
                why = f"the plan says {entries[far[0]].factors.lr:g}"
                do = "build it from the groups of this plan, or ask the plan that built it"
                raise UserError("optimizer", got=f"{far[0]} scaled by {factor:g}", why=why, do=do)
        held = [(group, row) for group, row in zip(optimizer.param_groups, rows, strict=True) if row]
        _require_ratios([(float(g["lr"]), float(g.get("lr_scale", 1.0)), row[0]) for g, row in held])


@functools.cache
def _watch_rates() -> None:
    """Check scaled groups before every step of every optimizer, from the first groups of a plan on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse steps with broken ratios, or by an optimizer of another kind; groups without ``lr_scale`` are free."""
    for kind in {group["lr_kind"] for group in optimizer.param_groups if "lr_kind" in group}:
        _require_kind(kind, optimizer, rescales=None)
    _require_own_rates(optimizer)
    # torch calls this before the hooks of the optimizer itself, so rates are those that schedulers wrote
    _require_ratios(
        [
            (float(group["lr"]), float(group["lr_scale"]), str(group.get("param_names", ["?"])[0]))
            for group in optimizer.param_groups
            if "lr_scale" in group and group["params"] and not isinstance(group["lr"], Tensor)
        ]
    )


def _names(group: Mapping[str, Any], entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of a group's parameters; refuse groups without names or without a scaled rate."""
    names = group.get("param_names")
    scaled = {entry.factors.lr for entry in entries.values()} != {1.0}
    if names is None or (scaled and "lr_scale" not in group):
        lacking = "names" if names is None else "a scaled rate"
        got = f"a group of {len(group['params'])} parameters without {lacking}"
        why = "it was built on the model's parameters, not on the plan's groups"
        raise UserError("optimizer", got=got, why=why, do="build it from plan.groups(model, lr=...)")
    return list(names)


def _require_ratios(rates: Sequence[tuple[float, float, str]]) -> None:
    """Refuse rates (lr, factor, first name) that are not one number times their factors: all equal, or one off."""
    bases = sorted(lr / factor for lr, factor, _ in rates)
    if not bases or bases[-1] <= bases[0] * (1 + _EXACT):
        return
    if len({lr for lr, _, _ in rates}) == 1:
        why = "a scheduler or the loop has set it, where it should multiply"
        do = "use a scheduler that multiplies (LambdaLR), or set group['lr'] = lr * group['lr_scale']"
        raise UserError("optimizer", got=f"lr {rates[0][0]:g} in every group", why=why, do=do)
    middle = bases[len(bases) // 2]  # the median is what most groups agree on
    lr, factor, name = max(rates, key=lambda rate: abs(math.log(max(rate[0], 1e-300) / rate[1] / max(middle, 1e-300))))
    why = f"beside the other groups it should be {middle * factor:g}"
    do = "multiply all groups by one number, or none (eta_min=0); a group whose rate is your own has no lr_scale"
    raise UserError("optimizer", got=f"lr {lr:g} for {name}", why=why, do=do)


def _require_planned(entries: Mapping[str, Entry], names: Collection[str], what: str) -> None:
    """Refuse parameters that are new since the plan, or missing."""
    new, gone = [n for n in names if n not in entries], [n for n in entries if n not in names]
    if new or gone:
        listed = [f"{name} (new)" for name in new[:3]] + [f"{name} (missing)" for name in gone[:3]]
        more = len(new) + len(gone) - len(listed)
        why = "they are not the parameters that were planned"
        do = "plan again once all parameters exist, and build the optimizer on all groups"
        raise UserError(what, got=", ".join(listed) + (f" and {more} more" if more else ""), why=why, do=do)


def _require_kind(kind: Optimizer, optimizer: torch.optim.Optimizer, *, rescales: bool | None) -> None:
    """Refuse an optimizer for which the plan was not made, and, if ``rescales``, L2 that Adam's kind divides."""
    name = type(optimizer).__name__
    if rescales is not False and name in _NO_RULE:
        raise UserError("optimizer", got=name, why=_NO_RULE[name], do="use one of Adam's, SGD's, Lion's or Muon's kind")
    theirs = _KINDS.get(name)
    if theirs is not None and theirs != kind and (kind, theirs) != ("muon", "adam"):
        raise UserError(
            "optimizer", got=name, why=f"the plan was made for {kind}", do=f'plan with optimizer="{theirs}"'
        )
    # Divided by the gradient's size, L2 follows no rule (microsoft/mup#73). By type: AdamW is a subclass of Adam.
    if rescales and type(optimizer) in _DIVIDES_L2:
        for group in optimizer.param_groups:
            if group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", False):
                got, why = (
                    f"{name} with weight_decay={group['weight_decay']:g}",
                    "decay added to the gradient is rescaled",
                )
                do = "use AdamW" + ", or pass decoupled_weight_decay=True" * ("decoupled_weight_decay" in group)
                raise UserError("optimizer", got=got, why=f"{why} by {name}", do=do)


def _require_own_rates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a Muon of torch that multiplies rates by more than it does in the base; what measures its steps may."""
    for group in optimizer.param_groups:
        if "adjust_lr_fn" in group and "muon_growth" in group and not group.get("lr_measured", False):
            chosen = group["adjust_lr_fn"] or "original"
            by = group["muon_growth"][chosen == "match_rms_adamw"]
            got = f'adjust_lr_fn="{chosen}", which multiplies the rate by {by:g} over the base'
            ours = "keep the base's ratio of fan-out to fan-in" if chosen == "original" else 'use "original"'
            do = f"{ours}, or wrap it in Spectral, which sets the step itself"
            require(math.isclose(by, 1.0), "Muon", got, "the rule has set a rate for this shape already", do)


def _muon_growth(entry: Entry) -> tuple[float, float]:
    """Return by how much more than in the base torch's Muon multiplies a rate: originally, and to match AdamW's."""
    rows, columns = entry.shape[:2]
    times = (entry.m_in, entry.m_out) if entry.transposed else (entry.m_out, entry.m_in)
    base_rows, base_columns = rows / times[0], columns / times[1]
    tall = max(1.0, rows / columns) / max(1.0, base_rows / base_columns)
    return math.sqrt(tall), math.sqrt(max(rows, columns) / max(base_rows, base_columns))
