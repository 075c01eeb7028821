"""Numbers that depend on width and by which a model's own code multiplies: attention logits, tables, all others.

A rule that does not see them is wrong by their ratio. Those of attention and of tables are read, from attributes or by
looking up a row; any other number that differs between the model and its base is refused.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.roles.arithmetic import UnreadableSource, logits_ratio
from sparing.scaling.roles.find import Facts
from sparing.scaling.roles.lookups import get, names_in
from sparing.scaling.roles.structure import attention_path, is_embedding, modules_sharing_weight
from sparing.scaling.rules import Rule

_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head", "d_kv", "d_k")
_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads", "num_head")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
_FACTORS = ("scaling", "scale", "inv_norm_factor", "softmax_scale", "attn_scale")
_DIVISORS = ("scale_attn", "norm_factor")
_PACKED = 3  # queries, keys and values


def logits_factor(model: nn.Module, base: nn.Module | None, known: Mapping[str, Facts], rule: Rule) -> float:
    """Return the factor on attention logits that takes them from what the model's code does to what the rule says.

    With heads of m times the base's dimensions the logits of μP are the base's times 1/m. A model that divides by
    √d_head does 1/√m of it itself; one that multiplies by a constant, or by nothing, does none.
    """
    if base is None or rule.logits(4.0) == 1.0:  # a rule that leaves attention alone: nothing need be understood
        return 1.0
    queries = [fact for fact in known.values() if fact.part in {"query", "qkv"} and len(fact.shape) > 1]
    projections = {attention_path(model, fact.module): fact for fact in queries}
    _require_known(model, known, projections)
    factors = {path: _factor(model, base, path, fact, rule) for path, fact in projections.items()}
    distinct = sorted(factors.values())
    if distinct and distinct[-1] > distinct[0] * (1 + 1e-9):
        got = f"logits to be multiplied by {distinct[0]:g} in one layer and by {distinct[-1]:g} in another"
        do = "scale head_dim equally in all layers, or pass a rule with attention=False"
        raise UserError("base", got=got, why="one factor on the logits must do for all layers", do=do)
    return distinct[0] if distinct else 1.0


def table_factors(model: nn.Module, base: nn.Module | None, known: Mapping[str, Facts]) -> dict[str, float]:
    """Return table name -> factor of the model's code on looked-up rows over the base's (Gemma: √m); ones omitted."""
    if base is None:
        return {}
    tables = {name: modules_sharing_weight(model, fact.module) for name, fact in known.items() if fact.lookup}
    paths = submodule(model, "").named_modules()
    slim = {id(module): submodule(base, path) for path, module in paths if is_embedding(module)}
    found = {name: {_lookup_gain(m) / _lookup_gain(slim[id(m)]) for m in modules} for name, modules in tables.items()}
    for name, ratios in found.items():
        if max(ratios) > min(ratios) * (1 + 1e-6):
            got = f"lookups that multiply it by {max(ratios):g} and by {min(ratios):g} times what the base does"
            do = "switch the scaling of embeddings off in both models (scale_embedding=False), or untie them"
            raise UserError(name, got=got, why="one factor must do for all that look up in it", do=do)
    return {name: max(ratios) for name, ratios in found.items() if abs(max(ratios) - 1) > 1e-6}


def require_no_unknown_factors(model: nn.Module, base: nn.Module | None, known: Mapping[str, Facts]) -> None:
    """Refuse numbers that depend on width outside attention and tables."""
    if base is None:
        return
    attention = {attention_path(model, fact.module) for fact in known.values() if fact.part}
    theirs = dict(submodule(base, "").named_modules())
    for path, module in submodule(model, "").named_modules():
        if path not in theirs or is_embedding(module) or any(_within(path, owner) for owner in attention):
            continue
        # All numbers that could be factors: attributes, and roots in the forward pass.
        ours, slim = (_attributes(one) | dict(_roots(one)) for one in (module, theirs[path]))
        for name in ours.keys() & slim.keys():
            if not math.isclose(ours[name], slim[name], rel_tol=1e-6):
                raise UserError(
                    f"{path}.{name}".lstrip("."),
                    got=f"{ours[name]:g} where the base has {slim[name]:g}",
                    why="the model multiplies by a number that goes with its width, and no rule knows of it",
                    do="give the model the base's number, or switch it off in both (scale_embedding=False, "
                    "scale_decoder_outputs=False), before plan",
                )


def _within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


def _require_known(model: nn.Module, known: Mapping[str, Facts], attentions: Collection[str]) -> None:
    """Refuse a module called attention with growing matrices of which none is known to project queries."""
    for path, module in submodule(model, "").named_modules():
        name = type(module).__name__.lower()
        if "attention" not in name and "attn" not in name:
            continue
        if any(_within(found, path) or _within(path, found) for found in attentions):
            continue
        if any(fact.matrix and fact.widths and _within(fact.module, path) for fact in known.values()):
            raise _not_understood(path, type(module).__name__, "nothing in it is known to project queries")


def _not_understood(path: str, kind: str, what: str) -> UserError:
    return UserError(
        f"attention {path}",
        got=f"{kind}: {what}",
        why="logits need a factor where heads are wider than the base's",
        do="name the projection q_proj or qkv, give its module num_heads or head_dim, and attn_scale = the number that "
        "its code multiplies logits by, in model and base; or pass a rule with attention=False",
    )


def _factor(model: nn.Module, base: nn.Module, path: str, fact: Facts, rule: Rule) -> float:
    module, slim = submodule(model, path), submodule(base, path)
    size = _head_size(module, fact.part, fact.shape, fact.fan_out)
    theirs = _head_size(slim, fact.part, fact.base_shape, fact.base_fan_out)
    if size is None or theirs is None:
        if fact.m_out == 1:
            return 1.0
        raise _not_understood(path, type(module).__name__, "no attribute tells how many heads it has")
    m = size / theirs
    if m == 1:
        return 1.0
    given, base_given = _logit_attribute(module), _logit_attribute(slim)
    # An attribute is believed before the source is read: it is also how an author answers a refusal (``attn_scale``).
    if given is not None and base_given is not None:
        does = given / base_given
    else:
        try:
            does = logits_ratio(module, slim, head=m, width=fact.fan_in / fact.base_fan_in)
        except UnreadableSource as error:
            raise _not_understood(path, type(module).__name__, str(error)) from None
    return rule.logits(m) / (does * math.sqrt(m))  # rules assume that the model divides by √d_head itself


def _head_size(module: nn.Module, part: str, shape: tuple[int, ...], rows: int) -> float | None:
    """Return the size of a head: an attribute, or outputs over heads; None if neither is known."""
    if (size := _int_attribute(module, _SIZES)) is not None:
        return size
    if (heads := _int_attribute(module, _COUNTS)) is None:
        return None
    if part != "qkv" or isinstance(module, nn.MultiheadAttention):
        return rows / heads
    groups = _int_attribute(module, _GROUPS)
    return rows / (_PACKED * heads if groups is None else heads + 2 * groups)


def _int_attribute(module: nn.Module, names: Iterable[str]) -> int | None:
    """Return the first of some attributes that is an integer, on a module or on its configuration."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _logit_attribute(module: nn.Module) -> float | None:
    """Return what an attention multiplies its logits by, from an attribute; None without one."""
    numbers = _attributes(module)
    factor = next((numbers[name] for name in _FACTORS if name in numbers), None)
    divisor = next((numbers[name] for name in _DIVISORS if name in numbers), None)
    return factor if factor is not None else None if divisor is None else 1.0 / divisor


def _lookup_gain(table: nn.Module) -> float:
    """Return the factor of a table on the rows it looks up; 1 if its output is no multiple of a row."""
    if type(table) in {nn.Embedding, nn.EmbeddingBag}:
        return 1.0
    weight = table.get_parameter("weight").detach()
    if weight.is_meta or not bool(weight.count_nonzero()):
        scale = _attributes(table).get("embed_scale")
        return 1.0 if scale is None else scale
    row = int(weight.abs().amax(1).argmax())  # the largest: a padding row is zero and tells nothing
    with torch.no_grad(), suppress(Exception):  # whatever a table of another kind wants to be called with
        got, stored = table(torch.tensor([row], device=weight.device)).double().reshape(-1), weight[row].double()
        ratio = float((got @ stored) / (stored @ stored))
        if torch.allclose(got, ratio * stored, rtol=4 * torch.finfo(weight.dtype).eps):
            return ratio
    return 1.0


def _attributes(module: nn.Module) -> dict[str, float]:
    """Return float attributes and single-valued float buffers."""
    held = {name: float(value) for name, value in module.__dict__.items() if isinstance(value, float)}
    single = {name: b for name, b in module._buffers.items() if isinstance(b, Tensor) and b.numel() == 1}
    return held | {n: float(b) for n, b in single.items() if b.is_floating_point() and not b.is_meta}


def _roots(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield source and value of roots of attributes in a forward pass, such as ``self.config.hidden_size ** -0.5``."""
    if type(module).__module__.startswith("torch.nn"):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):
        return
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        # Of a branch on an attribute only the side that is taken counts.
        if isinstance(node, ast.If) and (test := _self_attribute(node.test, module)) is not None:
            todo += node.body if test else node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        value = _root(node, module)
        if value is not None:
            yield ast.unparse(node), value


def _root(node: ast.AST, module: nn.Module) -> float | None:
    """Return the value of a root of an attribute of ``self``; None for any other expression."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and ast.unparse(node.func).endswith("sqrt"):
        inner, power = node.args[0], 0.5
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        try:
            inner, power = node.left, float(ast.literal_eval(node.right))
        except (ValueError, TypeError):
            return None
    else:
        return None
    value = _self_attribute(inner, module)
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) ** power if number else None


def _self_attribute(node: ast.AST, module: nn.Module) -> Any:
    """Return the value of ``self.a.b``; None for any other expression, or where an attribute is missing."""
    path = names_in(node) if isinstance(node, ast.expr) else []
    return get(module, path[1:]) if len(path) > 1 and path[0] == "self" else None
