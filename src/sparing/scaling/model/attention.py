"""The factor on attention logits, applied where each kind of attention allows it, without editing its code.

In order of preference: an attribute ``scaling`` of the module, by which Hugging Face models multiply logits; the
output of the query norm; the output of the query projection; the first third of a packed projection's output, or the
queries passed to a ``MultiheadAttention``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from sparing.blocks import submodule
from sparing.errors import UserError, require
from sparing.scaling.model.multipliers import attach_, detach_
from sparing.scaling.plans.entries import Entry
from sparing.scaling.roles.seen import SCALING, Hook
from sparing.scaling.roles.structure import attention_path, is_transposed

_ORIGINAL = "_sparing_original_scaling"


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One attention of a model."""

    path: str
    module: nn.Module
    # layer that gives the queries, packed or not; the module itself where it holds them as bare parameters
    projection: nn.Module
    packed: bool  # whether that layer gives keys and values too
    norm: nn.Module | None  # norm of the queries, if there is one
    hook: Hook  # where its logits can be multiplied


def attentions(model: nn.Module, entries: Iterable[Entry]) -> Iterator[Attention]:
    """Find the attentions of a model by the entries that are query projections."""
    for entry in entries:
        if entry.part not in {"query", "qkv"} or len(entry.shape) < 2:
            continue
        layer, path = submodule(model, entry.module), attention_path(model, entry.module)
        norm = submodule(model, entry.hook.norm) if entry.hook.norm else None
        yield Attention(path, submodule(model, path), layer, entry.part == "qkv", norm, entry.hook)


def scale_attention_(model: nn.Module, entries: Iterable[Entry], factor: float) -> None:
    """Multiply the logits of every attention by a factor; 1 touches nothing."""
    if factor == 1:
        return
    found = list(attentions(model, entries))
    if not found:
        got = f"{type(submodule(model, '')).__name__}, where nothing is known to project queries"
        why = f"its logits need a factor of {factor:g}, since its heads are wider than the base's"
        do = "keep the head size, or pass attention=False to the rule"
        raise UserError("attention", got=got, why=why, do=do)
    for one in found:
        _scale_(one, factor)


def unscale_attention_(model: nn.Module) -> None:
    """Restore the original scale of every attention."""
    for module in model.modules():
        detach_(module, "query_scale")
        if _ORIGINAL in module.__dict__:
            setattr(module, SCALING, module.__dict__.pop(_ORIGINAL))


def original_scaling(module: nn.Module) -> float | None:
    """Return what ``scaling`` was before it was multiplied; None if it was not."""
    original: float | None = module.__dict__.get(_ORIGINAL)
    return original


def query_rows(attention: Attention) -> tuple[int, int]:
    """Return the number of query outputs of a packed projection, which come first, and of all its outputs (counts)."""
    shape = attention.projection.get_parameter("weight").shape
    total = shape[1] if is_transposed(attention.projection) else shape[0]
    rows = attention.hook.rows
    if len(rows) != 2 or rows[0] != 0:
        raise _unknown_layout(attention)
    return rows[1], total


def _scale_(attention: Attention, factor: float) -> None:
    module, place = attention.module, attention.hook.place
    # The attribute first: fused kernels read it, where a hook on the projection would meet packed or rotated queries.
    if place == "attribute":
        module.__dict__[_ORIGINAL] = module.scaling
        setattr(module, SCALING, module.scaling * factor)  # type: ignore[operator]
    elif place == "norm" and attention.norm is not None:  # a norm would undo a factor on its input
        attach_(attention.norm, "query_scale", factor, where="output")
    elif place == "key_input":
        # a bias on the queries would miss a factor on their input, and take a part in the logits
        why, do = "a key that is no projection misses the factor", "build it without add_bias_kv and add_zero_attn"
        more = getattr(attention.projection, "bias_k", None) is not None
        got = "add_bias_kv" if more else "add_zero_attn"
        more = more or bool(getattr(attention.projection, "add_zero_attn", False))
        require(not more, f"attention {attention.path}", got, why, do)
        attach_(attention.projection, "query_scale", factor, where="key_input")
    elif place == "rows":
        rows, all_rows = query_rows(attention)
        if 3 * rows != all_rows:  # fewer keys than queries: the hook knows thirds only
            raise _unknown_layout(attention)
        attach_(attention.projection, "query_scale", factor, where="query_rows")
    elif place == "output":
        attach_(attention.projection, "query_scale", factor, where="output")
    else:
        do = "give queries a projection of their own, keep the head size, or pass attention=False to the rule"
        raise UserError(f"attention {attention.path}", got=attention.hook.why, why="its logits need a factor", do=do)


def _unknown_layout(attention: Attention) -> UserError:
    shape = tuple(attention.projection.get_parameter("weight").shape)
    got = f"packed queries, keys and values of shape {shape}, whose queries are outputs {attention.hook.rows}"
    why = "a factor can be put on the first third of them only"
    do = "give the module an attribute scaling by which it multiplies logits, or pass attention=False to the rule"
    return UserError(f"attention {attention.path}", got=got, why=why, do=do)
