"""What a forward pass says of each parameter: where it stands, what part of attention it is, what can be hooked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparing.blocks import named_parameters, submodule
from sparing.scaling.roles.flow import Flow, Key, Product, Use
from sparing.scaling.roles.observe import Inputs, edited
from sparing.scaling.roles.operations import rows_of

SCALING = "scaling"  # attribute by which attentions of transformers multiply logits

Place = Literal["attribute", "norm", "output", "rows", "key_input", ""]
"""Where a factor on logits can be applied: on an attribute of the attention, on the output of the queries' norm or
projection, on rows of a packed projection's output, on the keys passed to an attention of torch; or nowhere."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Where the logits of one query projection can be multiplied."""

    place: Place
    norm: str = ""  # path of the queries' norm
    rows: tuple[int, ...] = ()  # of a packed projection the outputs that are queries: start, stop, start, stop, …
    why: str = ""  # of no place, the reason


NOWHERE = Hook("")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What was seen, by canonical name of the parameter."""

    flow: Flow
    contracted: Mapping[str, int | None]  # matrices, in order of use -> dimension that is summed over, where known
    ends: Mapping[str, str]  # matrices that no matrix follows -> path of the module that reads out
    stems: frozenset[str]  # matrices that no weight precedes
    chosen: frozenset[str]  # what is looked up by numbers that a weight gave, such as the biases of experts
    gates: frozenset[str]  # matrices whose outputs choose or weigh: a softmax, a sigmoid or topk takes them as they are
    parts: Mapping[str, str]  # of attention: query, key, value or qkv (packed)
    hooks: Mapping[str, Hook]  # query projections
    turned: frozenset[str]  # matrices that products sum along more than one of their dimensions
    called: frozenset[str]  # parameters of which the module's own input (a table's output) can carry a factor


def look(model: nn.Module, flow: Flow, inputs: Inputs) -> Seen:
    """Gather what a pass showed; ``inputs`` are those of the pass."""
    products = [use for use in flow.uses if use.kind == "product"]
    axes: dict[str, set[int | None]] = {}
    for use in products:
        axes.setdefault(use.parameter, set()).add(use.contracted)
    unfollowed = [use for use in products if not use.followed]
    inner = {use.parameter for use in products if use.followed}
    parts = _parts(flow)
    inside: dict[str, list[int]] = {}
    for at, done in enumerate(flow.trace.operations):
        inside.setdefault(done.module, []).append(at)
    return Seen(
        flow=flow,
        contracted={name: next(iter(found)) if len(found) == 1 else None for name, found in axes.items()},
        ends={use.parameter: use.module for use in unfollowed if use.parameter not in inner},
        stems=frozenset(axes) - {use.parameter for use in products if use.fed},
        chosen=frozenset(use.parameter for use in flow.uses if use.kind == "lookup" and use.fed),
        gates=frozenset(use.parameter for use in products if use.chooses),
        parts=parts,
        hooks=_hooks(model, flow, parts, inputs),
        turned=frozenset(name for name, found in axes.items() if len(found - {None}) > 1),
        called=frozenset(name for name in named_parameters(model) if _is_called(model, flow, name, inside)),
    )


def _parts(flow: Flow) -> dict[str, str]:
    """Return which part of attention matrices are, by the products that they lead to."""
    found: dict[str, set[str]] = {}
    for product in flow.products:
        sides = {"query": product.left, "key": product.right} if product.softmaxed else {}
        sides |= {"value": product.right} if product.weighs else {}
        for part, degrees in sides.items():
            for use in _matrices(flow, degrees):
                found.setdefault(use.parameter, set()).add(part)
    # Keys and values that share a matrix are keys; whatever shares one with queries is packed.
    return {
        name: next(iter(parts)) if len(parts) == 1 else "qkv" if "query" in parts else "key"
        for name, parts in found.items()
    }


def _matrices(flow: Flow, degrees: Mapping[Key, float]) -> list[Use]:
    uses = [flow.uses[key] for key in degrees if isinstance(key, int)]
    return [use for use in uses if use.kind == "product"]


def _hooks(model: nn.Module, flow: Flow, parts: Mapping[str, str], inputs: Inputs) -> dict[str, Hook]:
    """Return where the logits of each query projection can be multiplied, each product of them once.

    Nothing is looked for where the base shows that no factor is due.
    """
    if flow.compared and all(math.isclose(one.growth, 1) and math.isclose(one.own, 1) for one in flow.logits):
        return {}
    found: dict[str, Hook] = {}
    for product in flow.logits:
        for use in _matrices(flow, product.left):
            if parts[use.parameter] in {"query", "qkv"} and use.parameter not in found:
                found[use.parameter] = _hook(model, flow, use, product)
    attributes = _attributes(model, found)
    if attributes and _obeys(model, flow, attributes, inputs):
        for name, hook in found.items():
            if _attention(model, name) in attributes:
                found[name] = Hook("attribute", hook.norm, hook.rows)
    for product in flow.logits:
        names = {use.parameter for use in _matrices(flow, product.left)} & found.keys()
        if not all(found[name].place == "attribute" for name in names) and (why := _unlike(flow, product, found)):
            found |= {name: Hook("", found[name].norm, found[name].rows, why) for name in names}
    return found


def _hook(model: nn.Module, flow: Flow, use: Use, product: Product) -> Hook:
    gains = [
        flow.uses[key]
        for key, degree in product.left.items()
        if isinstance(key, int)
        and degree == 1.0
        and flow.uses[key].kind == "gain"
        and flow.uses[key].operation > use.operation
    ]
    norm = gains[-1].module if gains and _holds(model, gains[-1]) else ""
    degree = next(degree for key, degree in product.left.items() if isinstance(key, int) and flow.uses[key] is use)
    if norm:
        return Hook("norm", norm, _rows(flow, use, product))
    if degree != 1.0:
        return Hook("", "", (), "logits of normed queries, for which no law is known")
    if isinstance(submodule(model, use.module), nn.MultiheadAttention):
        return Hook("key_input", "", _rows(flow, use, product))
    packed = any(isinstance(key, int) and flow.uses[key].parameter == use.parameter for key in product.right)
    if not _holds(model, use):
        return Hook("", "", (), "the projection of its queries is not called as a module")
    if packed:
        return Hook("rows", "", _rows(flow, use, product))
    spread = _reaches(flow, use, {one.operation for one in flow.logits})
    return Hook("", "", (), "its queries are used elsewhere too") if spread else Hook("output", "")


def _rows(flow: Flow, use: Use, product: Product, side: int = 0) -> tuple[int, ...]:
    return rows_of(flow.trace, use.leaving, (use.operation, product.operation), side)


def _attributes(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the paths of attentions with a number ``scaling``."""
    paths = {_attention(model, name) for name in names}
    return frozenset(path for path in paths if isinstance(getattr(submodule(model, path), SCALING, None), float))


def _attention(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    return path if isinstance(submodule(model, path), nn.MultiheadAttention) else path.rpartition(".")[0]


def _obeys(model: nn.Module, flow: Flow, paths: frozenset[str], inputs: Inputs) -> bool:
    """Tell whether doubling the attribute doubles the logits of these attentions, and nothing else."""

    def double(modules: Mapping[str, nn.Module]) -> None:
        for path in paths:
            setattr(modules[path], SCALING, 2 * getattr(modules[path], SCALING))

    changed = edited(model, inputs, flow.trace, double)
    if changed is None or changed.troubles or any(use.before != 1 or use.after != 1 for use in changed.uses):
        return False
    for product in changed.products:
        names = {use.parameter for use in _matrices(changed, product.left)} if product.softmaxed else set()
        expected = 2.0 if any(_attention(model, name) in paths for name in names) else 1.0
        if abs(product.own - expected) > 1e-6:
            return False
    return True


def _unlike(flow: Flow, product: Product, hooks: Mapping[str, Hook]) -> str:
    """Return why a product would not be multiplied exactly once by the hooks; empty if it would."""
    total = 0.0
    for side, degrees in enumerate((product.left, product.right)):
        for key, degree in degrees.items():
            if not isinstance(key, int):
                continue
            use = flow.uses[key]
            hook = hooks.get(use.parameter, Hook(""))
            if use.kind == "product" and hook.place in {"output", "attribute"}:
                total += degree
            elif use.kind == "product" and hook.place in {"rows", "key_input"}:
                total += degree * (_rows(flow, use, product, side) == hook.rows)
            elif use.kind == "gain" and any(one.norm == use.module for one in hooks.values() if one.place == "norm"):
                total += degree
    reasons = [hooks[use.parameter].why for use in _matrices(flow, product.left) if use.parameter in hooks]
    if total == 1.0:
        return ""
    return next(filter(None, reasons), "no factor on its queries multiplies each of its products once")


def _reaches(flow: Flow, use: Use, ends: set[int]) -> bool:
    """Tell whether what comes out of a matrix goes anywhere but into some products."""
    reached, weights = {use.leaving}, {one.operation for one in flow.uses if one.kind == "product"}
    for at in range(use.operation + 1, len(flow.trace.operations)):
        done = flow.trace.operations[at]
        if at not in ends and any(number in reached for number in done.operands):
            if at in weights:
                return True
            reached.update(done.results)
    return bool(reached & flow.trace.outputs)


def _holds(model: nn.Module, use: Use) -> bool:
    """Tell whether the module in whose pass a parameter is used holds it."""
    wanted = named_parameters(model)[use.parameter]
    return any(one is wanted for one in submodule(model, use.module)._parameters.values())


def _is_called(model: nn.Module, flow: Flow, name: str, inside: Mapping[str, list[int]]) -> bool:
    """Tell whether each product with a parameter takes in what its module is given, and nothing else does there."""
    uses = [use for use in flow.of(name) if use.kind in {"product", "lookup"}]
    for use in uses:
        holder = submodule(model, use.module)
        matrices = [p for p in holder._parameters.values() if p is not None and p.ndim > 1]
        if not _holds(model, use) or len(matrices) != 1 or isinstance(holder, nn.RNNBase | nn.RNNCellBase):
            return False
        calls = flow.trace.calls.get(use.module, [])
        if use.kind == "lookup":
            if any(len(returned) != 1 for _, returned in calls):
                return False
            continue
        given = {flow.root(number) for one, _ in calls for number in one}
        if any(len(one) != 1 for one, _ in calls) or flow.root(use.entering) not in given:
            return False
        meant = {one.operation for one in uses}
        for at in inside[use.module]:
            done = flow.trace.operations[at]
            if (
                any(flow.root(number) in given for number in done.operands)
                and at not in meant
                and not any(number in flow.views for number in done.results)
            ):
                return False
    return bool(uses)
