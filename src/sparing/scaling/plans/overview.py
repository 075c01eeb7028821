"""Widths and readout of a plan, from the facts of all parameters."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.roles.find import Facts
from sparing.scaling.roles.model_factors import OwnFactors
from sparing.scaling.roles.structure import Structure, owner
from sparing.scaling.roles.tied_norm import tied_norm
from sparing.scaling.rules import Optimizer, Role, Rule


def overview(
    model: nn.Module,
    known: Mapping[str, Facts],
    found: Mapping[str, tuple[Role, str]],
    structure: Structure,
    own: OwnFactors,
    rule: Rule,
    optimizer: Optimizer,
) -> dict[str, Any]:
    """Return the fields of ``Plan`` on widths and readout."""
    hidden = [fact for name, fact in known.items() if found[name][0] == "hidden"]
    heads = {name: path for name, path in structure.readouts.items() if found[name][0] in {"output", "embedding"}}
    tied = [name for name in heads if found[name][0] == "embedding"]
    for name in tied:
        if readout_factor(rule, optimizer, known[name].m_out, own.readouts.get(name, 1.0)) != 1.0:
            _require_hooked(model, name, heads[name])
    # A tied readout has no entry of its own, so it is named first.
    first = next(iter([*tied, *heads]), "")
    fact = known.get(first)
    # What reads out by another's weight carries no factor: the hook is on the owner, where the entry has it.
    path = heads.get(first, "") if first in tied else owner(first)[0]
    return {
        "width": int(median(fact.fan_in for fact in hidden)) if hidden else 0,
        "base_width": int(median(fact.base_fan_in for fact in hidden)) if hidden else 0,
        "readout": path,
        "readout_ratio": (fact.m_out if fact.lookup else fact.m_in) if fact else 1.0,
        "readout_own": own.readouts.get(first, 1.0) if first in tied else 1.0,
        "readout_norm": tied_norm(model, structure.seen.flow, first) if first in tied and structure.seen else "",
    }


def readout_factor(rule: Rule, optimizer: Optimizer, ratio: float, own: float) -> float:
    """Return the factor on a tied readout's input, for inputs of ``ratio`` times the base's."""
    found = rule.factors("output", fan_in=ratio, fan_out=1.0, density=1.0, depth=1.0, optimizer=optimizer)
    return found.forward / own


def _require_hooked(model: nn.Module, name: str, path: str) -> None:
    """Refuse a tied readout that is no module's, so that no hook can multiply its input."""
    wanted = named_parameters(model)[name]
    if not any(p is wanted for p in submodule(model, path)._parameters.values()):
        got = f"read out in {path or 'the model'} as a bare tensor"
        why = "its input needs a factor of its own, which only a layer that is called can carry"
        raise UserError(name, got=got, why=why, do="read out by an nn.Linear whose weight is the table's")
