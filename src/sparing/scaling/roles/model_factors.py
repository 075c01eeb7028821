"""Numbers that depend on width and by which a model's own code multiplies: attention logits, tables, readouts.

A rule that does not see them is wrong by their ratio. They were seen where two forward passes differ; those on logits,
on what is looked up or taken in and on readouts are undone, any other is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.roles.flow import Product, Use
from sparing.scaling.roles.seen import Seen
from sparing.scaling.rules import Role, Rule

_NEARLY = 1e-6  # relative: models hold such numbers in single precision


@dataclass(frozen=True, slots=True)
class OwnFactors:
    """The model's own factors over the base's, to be undone."""

    weights: Mapping[str, float]  # of tables, of what takes data in and of readouts, by name
    readouts: Mapping[str, float]  # of tied readouts, by the name of their table


def own_factors(model: nn.Module, seen: Seen, roles: Mapping[str, Role]) -> OwnFactors:
    """Return the numbers on what weights give, and refuse those that no rule knows of."""
    flow = seen.flow
    if flow.troubles:
        raise _unknown(*flow.troubles[0])
    weights: dict[str, set[float]] = {}
    readouts: dict[str, set[float]] = {}
    for use in flow.uses:
        role, reads = roles.get(use.parameter), use.kind == "product"
        tied = reads and role == "embedding" and use.parameter in seen.ends and _looked_up(flow.uses, use)
        if tied or (reads and role == "output"):
            _require_whole(model, use, use.after)
            (readouts if tied else weights).setdefault(use.parameter, set()).add(use.before * use.after)
        elif role == "embedding" and use.kind in {"lookup", "product", "shift"}:
            _require_whole(model, use, use.before)
            weights.setdefault(use.parameter, set()).add(use.before * use.after)
        elif not math.isclose(use.before * use.after, 1.0, rel_tol=_NEARLY):
            number, base, module = use.number or (use.before * use.after, 1.0, use.module)
            raise _unknown(module, number, base)
    return OwnFactors(_single(weights), _single(readouts))


def _looked_up(uses: Iterable[Use], use: Use) -> bool:
    return any(one.parameter == use.parameter and one.kind == "lookup" for one in uses)


def _require_whole(model: nn.Module, use: Use, factor: float) -> None:
    """Refuse a number on the other side of a bias than the factor that would undo it."""
    bias = submodule(model, use.module)._parameters.get("bias")
    if bias is not None and use.kind == "product" and not math.isclose(factor, 1.0, rel_tol=_NEARLY):
        number, base, module = use.number or (factor, 1.0, use.module)
        raise _unknown(module, number, base)


def _single(found: Mapping[str, set[float]]) -> dict[str, float]:
    """Return the one factor of each weight; refuse several."""
    for name, ratios in found.items():
        if max(ratios) > min(ratios) * (1 + _NEARLY):
            got = f"lookups that multiply it by {max(ratios):g} and by {min(ratios):g} times what the base does"
            do = "switch the scaling of embeddings off in both models (scale_embedding=False), or untie them"
            raise UserError(name, got=got, why="one factor must do for all that look up in it", do=do)
    return {name: max(ratios) for name, ratios in found.items() if not math.isclose(max(ratios), 1, rel_tol=_NEARLY)}


def _unknown(module: str, number: float, base: float) -> UserError:
    return UserError(
        module or "model",
        got=f"a number {number:g} where the base has {base:g}",
        why="the model multiplies by it, or takes a softmax over so many; it goes with width, and no rule knows of it",
        do="give the model the base's number, or switch it off in both (scale_embedding=False, "
        "scale_decoder_outputs=False), before plan",
    )


def logits_factor(seen: Seen, rule: Rule) -> float:
    """Return the factor on attention logits that takes them from what the model's code does to what the rule says.

    With m times as many entries in the sum of queries times keys, the logits of μP are the base's times 1/m. A model
    that divides by √d_head does 1/√m of it itself; one that multiplies by a constant, or by nothing, does none.
    """
    if rule.logits(4.0) == 1.0:  # a rule that leaves attention alone: nothing need be understood
        return 1.0
    for product in seen.flow.products:
        if not product.softmaxed and not product.weighs and not math.isclose(product.growth, 1.0):
            what = (
                f"a product of two activations over {product.growth:g} times the base's entries, and no softmax of it"
            )
            raise _not_understood(product.module, what)
    factors = {product.module: _factor(product, rule) for product in seen.flow.logits}
    for product in seen.flow.logits:
        if factors[product.module] != 1.0:
            _require_hooks(seen, product)
    distinct = sorted(factors.values())
    if distinct and distinct[-1] > distinct[0] * (1 + _NEARLY):
        got = f"logits to be multiplied by {distinct[0]:g} in one layer and by {distinct[-1]:g} in another"
        do = "scale head_dim equally in all layers, or pass a rule with attention=False"
        raise UserError("base", got=got, why="one factor on the logits must do for all layers", do=do)
    return distinct[0] if distinct else 1.0


def _factor(product: Product, rule: Rule) -> float:
    # Rules assume that the model divides by √d_head itself.
    found = rule.logits(product.growth) / (product.own * math.sqrt(product.growth))
    return 1.0 if math.isclose(found, 1.0, rel_tol=_NEARLY) else found


def _require_hooks(seen: Seen, product: Product) -> None:
    """Refuse logits that no hook multiplies."""
    uses = [seen.flow.uses[key] for key in product.left if isinstance(key, int)]
    names = [use.parameter for use in uses if use.kind == "product"]
    if not names:
        raise _not_understood(product.module, "nothing in it is known to project queries")
    for name in names:
        if name in seen.hooks and not seen.hooks[name].place:
            raise _not_understood(product.module, seen.hooks[name].why)


def _not_understood(path: str, what: str) -> UserError:
    return UserError(
        f"attention {path}",
        got=what,
        why="logits need a factor where heads are wider than the base's",
        do="give queries a projection of their own, or its module an attribute scaling by which it multiplies logits; "
        "keep the head size; or pass a rule with attention=False",
    )
