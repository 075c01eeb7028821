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
from sparing.errors import UserError
from sparing.scaling.model.multipliers import attach_, detach_
from sparing.scaling.plans.entries import Entry
from sparing.scaling.roles.structure import attention_path, is_transposed

_NORMS = ("q_norm", "query_norm", "q_layernorm", "norm_q", "q_ln")
_INTERLEAVED = ("query_key_value",)  # one head after another, each with its query, key and value
_SCALING, _ORIGINAL = "scaling", "_sparing_original_scaling"


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One attention of a model."""

    path: str
    module: nn.Module
    # layer that gives the queries, packed or not; the module itself where it holds them as bare parameters
    projection: nn.Module
    packed: bool  # whether that layer gives keys and values too
    norm: nn.Module | None  # norm of the queries, if there is one


def attentions(model: nn.Module, entries: Iterable[Entry]) -> Iterator[Attention]:
    """Find the attentions of a model by the entries that are query projections."""
    for entry in entries:
        if entry.part not in {"query", "qkv"} or len(entry.shape) < 2:
            continue
        layer, path = submodule(model, entry.module), attention_path(model, entry.module)
        module = submodule(model, path)
        norm = next((found for name in _NORMS if isinstance(found := getattr(module, name, None), nn.Module)), None)
        yield Attention(path, module, layer, entry.part == "qkv", norm)


def scale_attention_(model: nn.Module, entries: Iterable[Entry], factor: float) -> None:
    """Multiply the logits of every attention by a factor; 1 touches nothing."""
    if factor == 1:
        return
    found = list(attentions(model, entries))
    if not found:
        got = f"{type(submodule(model, '')).__name__}, where nothing is known to project queries"
        why = f"its logits need a factor of {factor:g}, since its heads are wider than the base's"
        do = "name the projection q_proj or qkv, or keep the head size, or pass attention=False to the rule"
        raise UserError("attention", got=got, why=why, do=do)
    for one in found:
        _scale_(one, factor)


def unscale_attention_(model: nn.Module) -> None:
    """Restore the original scale of every attention."""
    for module in model.modules():
        detach_(module, "query_scale")
        if _ORIGINAL in module.__dict__:
            setattr(module, _SCALING, module.__dict__.pop(_ORIGINAL))


def original_scaling(module: nn.Module) -> float | None:
    """Return what ``scaling`` was before it was multiplied; None if it was not."""
    original: float | None = module.__dict__.get(_ORIGINAL)
    return original


def query_rows(attention: Attention) -> tuple[int, int]:
    """Return the number of query outputs of a packed projection, which come first, and of all its outputs (counts)."""
    names = [name for name, child in attention.module.named_children() if child is attention.projection]
    shape = attention.projection.get_parameter("weight").shape
    total = shape[1] if is_transposed(attention.projection) else shape[0]
    heads = getattr(getattr(attention.module, "config", None), "num_attention_heads", None)
    size = getattr(attention.module, "head_dim", None)
    rows = heads * size if isinstance(heads, int) and isinstance(size, int) else total // 3
    if names[0] in _INTERLEAVED or not rows <= total or (rows == total // 3 and total % 3):
        raise _unknown_layout(attention)
    return rows, total


def _scale_(attention: Attention, factor: float) -> None:
    module = attention.module
    # The attribute first: fused kernels read it, where a hook on the projection would meet packed or rotated queries.
    if isinstance(getattr(module, _SCALING, None), float):
        module.__dict__[_ORIGINAL] = module.scaling
        setattr(module, _SCALING, module.scaling * factor)  # type: ignore[operator]
    elif attention.norm is not None:  # a norm would undo a factor on its input
        attach_(attention.norm, "query_scale", factor, where="output")
    elif isinstance(attention.projection, nn.MultiheadAttention):
        attach_(attention.projection, "query_scale", factor, where="query_input")
    elif attention.packed:
        rows, all_rows = query_rows(attention)
        if 3 * rows != all_rows:  # fewer keys than queries: the hook knows thirds only
            raise _unknown_layout(attention)
        attach_(attention.projection, "query_scale", factor, where="query_rows")
    else:
        attach_(attention.projection, "query_scale", factor, where="output")


def _unknown_layout(attention: Attention) -> UserError:
    got = f"packed queries, keys and values of shape {tuple(attention.projection.get_parameter('weight').shape)}"
    why = "it is not known which of its outputs are queries"
    do = "give the module an attribute scaling for its logits, or pass attention=False to the rule"
    return UserError(f"attention {attention.path}", got=got, why=why, do=do)
