"""The factor on attention logits, put where each kind of attention lets it be put, without editing its code.

In order of preference: an attribute ``scaling`` of the attention module, which Hugging Face models multiply logits by;
the normalised queries, where a query norm would undo a factor before it; the output of the query projection; the first
third of a packed projection's output, or the queries that a ``MultiheadAttention`` is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.entries import Entry
from sparing.scaling.multipliers import attach_, detach_
from sparing.scaling.structure import is_transposed

_NORMS = ("q_norm", "query_norm", "q_layernorm", "norm_q", "q_ln")
_INTERLEAVED = ("query_key_value",)  # heads in turn, each with its query, key and value
_SCALING, _OWN = "scaling", "_sparing_own_scaling"


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
        layer = submodule(model, entry.module)
        bare = isinstance(layer, nn.MultiheadAttention)
        path = entry.module if bare else entry.module.rpartition(".")[0]
        module = submodule(model, path)
        norm = next((found for name in _NORMS if isinstance(found := getattr(module, name, None), nn.Module)), None)
        yield Attention(path, module, layer, entry.part == "qkv", norm)


def scale_attention_(model: nn.Module, entries: Iterable[Entry], factor: float) -> None:
    """Multiply the logits of every attention by a factor; 1 touches nothing."""
    if factor == 1:
        return
    found = list(attentions(model, entries))
    if not found:
        raise UserError(
            "attention",
            got=f"{type(submodule(model, '')).__name__}, where nothing is known to project queries",
            why=f"its logits need a factor of {factor:g}, since its heads are wider than the base's",
            do="name the projection q_proj or qkv, or keep the head size, or pass attention=False to the rule",
        )
    for one in found:
        _scale_(one, factor)


def unscale_attention_(model: nn.Module) -> None:
    """Give every attention its own scale back."""
    for module in model.modules():
        detach_(module, "query_scale")
        if _OWN in module.__dict__:
            setattr(module, _SCALING, module.__dict__.pop(_OWN))


def own_scaling(module: nn.Module) -> float | None:
    """Return what ``scaling`` was before it was multiplied; None if it was not."""
    own: float | None = module.__dict__.get(_OWN)
    return own


def query_rows(attention: Attention) -> tuple[int, int]:
    """Return how many outputs of a packed projection are queries; they come first.

    A ``UserError`` says if heads come in turn, each with its query, key and value, or if the size is not known.
    """
    names = [name for name, child in attention.module.named_children() if child is attention.projection]
    total = _outputs(attention.projection)
    heads = getattr(getattr(attention.module, "config", None), "num_attention_heads", None)
    size = getattr(attention.module, "head_dim", None)
    rows = heads * size if isinstance(heads, int) and isinstance(size, int) else total // 3
    if names[0] in _INTERLEAVED or not rows <= total or (rows == total // 3 and total % 3):
        _refuse_layout(attention)
    return rows, total


def _outputs(layer: nn.Module) -> int:
    shape = layer.get_parameter("weight").shape
    return shape[1] if is_transposed(layer) else shape[0]


def _scale_(attention: Attention, factor: float) -> None:
    module = attention.module
    if isinstance(getattr(module, _SCALING, None), float):
        module.__dict__[_OWN] = module.scaling
        setattr(module, _SCALING, module.scaling * factor)  # type: ignore[operator]
    elif attention.norm is not None:
        attach_(attention.norm, "query_scale", factor, where="output")
    elif isinstance(attention.projection, nn.MultiheadAttention):
        attach_(attention.projection, "query_scale", factor, where="query_input")
    elif attention.packed:
        rows, all_rows = query_rows(attention)
        if 3 * rows != all_rows:
            _refuse_layout(attention)
        attach_(attention.projection, "query_scale", factor, where="query_rows")
    else:
        attach_(attention.projection, "query_scale", factor, where="output")


def _refuse_layout(attention: Attention) -> None:
    raise UserError(
        f"attention {attention.path}",
        got=f"packed queries, keys and values of shape {tuple(attention.projection.get_parameter('weight').shape)}",
        why="it is not known which of its outputs are queries",
        do="give the module an attribute scaling for its logits, or pass attention=False to the rule",
    )
