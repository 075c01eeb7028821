"""Attention within each document of a packed row, without the mask of every pair of tokens.

transformers hands every attention what its mask function returns. Here that is the documents of each row, and each of
them is a causal product of its own: on CUDA all in one kernel, elsewhere one after the other.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.jobs.lm.names import Attention
from sparing.layersample.masters import HALVES

NAME: Final = "sparing_documents"  # under which transformers knows it

Lengths = tuple[tuple[int, ...], ...]  # of each row: tokens of each of its documents (counts)

WIDEST_HEAD: Final = 256  # widest head of CUDA's kernel (count)

_PACKED: ContextVar[Lengths | None] = ContextVar("packed", default=None)
_PRICED_ON: ContextVar[str] = ContextVar("priced on", default="")


@dataclass(frozen=True, slots=True)
class Documents:
    """What attention gets in place of a mask."""

    lengths: Lengths
    window: int | None  # tokens that a token sees, itself included (count); None: all before it


def loader_arguments(attention: Attention) -> dict[str, str]:
    """What the loaders of transformers take for a setting; nothing for what they take by themselves."""
    if attention == "documents":
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _documents)
    known = {"auto": {}, "documents": {"attn_implementation": NAME}}
    return known.get(attention, {"attn_implementation": attention})


def name_of(implementation: str | None) -> Attention:
    """The setting that gave a model its implementation."""
    found: Any = "documents" if implementation == NAME else implementation or "auto"
    return found  # type: ignore[no-any-return]


def refused() -> UserError:
    """The error of a model that cannot attend by document."""
    why = "its attention is not a causal product, maybe in a window, to which rows can be handed"
    return UserError("attention", got="documents", why=why, do="pass --attention auto")


def check_documents(model: nn.Module) -> None:
    """Refuse a model of which two documents in a row do not learn what each learns alone: caps, sinks, chunks."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    plain = getattr(model, "_supports_sdpa", False) and getattr(config, "attention_chunk_size", None) is None
    both = any(getattr(module, "is_causal", True) is False for module in model.modules())
    if both or not plain:
        raise refused()


def lengths_of(positions: Tensor) -> Lengths:
    """Tokens of each document of each row, from positions in the documents, int64 (batch, length).

    Example:
        >>> lengths_of(torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]]))
        ((3, 1), (4,))
    """
    # one begins where positions do not go on, as for transformers; as a list, for no operation is to be a fake's
    starts = (
        [0, *(at for at, (a, b) in enumerate(itertools.pairwise(row), start=1) if b != a + 1), len(row)]
        for row in positions.tolist()
    )
    return tuple(tuple(b - a for a, b in itertools.pairwise(row)) for row in starts)


@contextlib.contextmanager
def packed(positions: Tensor | None) -> Iterator[None]:
    """Let models that run meanwhile know which documents their rows hold; ``positions``: of tokens, in host memory."""
    token = _PACKED.set(None if positions is None else lengths_of(positions))
    try:
        yield
    finally:
        _PACKED.reset(token)


@contextlib.contextmanager
def priced_on(device: str) -> Iterator[None]:
    """Let fakes, which lie on the CPU, hold what the kernels of a device hold."""
    token = _PRICED_ON.set(device)
    try:
        yield
    finally:
        _PRICED_ON.reset(token)


def _documents(*, batch_size: int, q_length: int, local_size: int | None = None, **named: Any) -> Documents | Any:
    """The documents of rows that are packed; for others the mask of fused attention."""
    from transformers.masking_utils import sdpa_mask

    lengths = _PACKED.get()
    if lengths is None or len(lengths) != batch_size or any(sum(row) != q_length for row in lengths):
        return sdpa_mask(batch_size=batch_size, q_length=q_length, local_size=local_size, **named)
    return Documents(lengths, local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attention of (batch, heads, length, width), as (batch, length, heads, width)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    whole, mask = partial(sdpa_attention_forward, module, dropout=dropout, **named), attention_mask
    if not isinstance(mask, Documents):
        return whole(query, key, value, mask)[0], None
    kernel = query.dtype in HALVES and not dropout and query.shape[-1] == value.shape[-1] <= WIDEST_HEAD
    kernel = kernel and query.shape[-1] % 8 == 0
    if kernel and _PRICED_ON.get() == "cuda":
        # what the kernel holds: no mask, and one result
        return whole(query, key, value, None)[0], None
    if kernel and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return _at_once(query, key, value, mask, named.get("scaling")), None
    if all(len(row) == 1 for row in mask.lengths):
        return whole(query, key, value, _near(query.shape[2], mask.window, query.device))[0], None
    rows = []
    for row, lengths in enumerate(mask.lengths):
        ends = itertools.accumulate(lengths)
        parts = [(slice(row, row + 1), slice(None), slice(end - n, end)) for end, n in zip(ends, lengths, strict=True)]
        near = [_near(length, mask.window, query.device) for length in lengths]
        found = [whole(query[at], key[at], value[at], seen)[0] for at, seen in zip(parts, near, strict=True)]
        rows.append(torch.cat(found, dim=1) if len(found) > 1 else found[0])
    return torch.cat(rows) if len(rows) > 1 else rows[0], None


def _at_once(query: Tensor, key: Tensor, value: Tensor, mask: Documents, scaling: float | None) -> Tensor:
    """All documents in one kernel, which knows where each of them ends."""
    from torch.nn.attention import varlen

    lengths = [length for row in mask.lengths for length in row]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(query.device, non_blocking=True)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    # a token sees itself and so many before it
    window = (-1 if mask.window is None else mask.window - 1, 0)
    attend: Any = varlen.varlen_attn
    named: dict[str, Any] = {"scale": scaling, "window_size": window}
    if (groups := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(attend).parameters:
            named["enable_gqa"] = True
        else:  # torch before 2.13
            flat[1:] = [tensor.repeat_interleave(groups, 1) for tensor in flat[1:]]
    found: Tensor = attend(*flat, ends, ends, max(lengths), max(lengths), **named)
    return found.reshape(query.shape[0], query.shape[2], *found.shape[1:])


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens of a document see which, (1, 1, length, length); None if each sees all before it."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    apart = at[:, None] - at
    return ((apart >= 0) & (apart < window))[None, None]
